"""Whether ranks share a GPU: seen by what they have, not by how many of them each can see."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from lockstep.runtime import context
from lockstep.runtime.world import World


@pytest.mark.parametrize(
    ("names", "shared"), [(["a", "b", "c", "d"], False), (["a", "b", "a", "c"], True), (["a"] * 4, True)]
)
def test_devices_that_ranks_have(names: list[str], shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: a script may train twice, with the same meeting point."""
    store, size = dist.HashStore(), len(names)
    with ThreadPoolExecutor(size) as threads:
        for attempt in range(2):
            monkeypatch.setattr(context, "_DEVICE_CHECKS", iter([attempt] * size))  # each process counts by itself
            worlds = [World(rank, size, rank, size) for rank in range(size)]
            found = list(threads.map(lambda w: context.share_devices(w, names[w.rank], store), worlds))
            assert found == [shared] * size
