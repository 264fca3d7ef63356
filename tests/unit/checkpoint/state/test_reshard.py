"""Which rank writes which tensor: every tensor once, whatever the state of a stateful object is on each rank."""

from __future__ import annotations

import pytest
import torch

from lockstep.checkpoint.state.encoding import CapturedTensor
from lockstep.checkpoint.state.reshard import replicated_sizes, shards_to_write

MODEL = {f"model.{name}": CapturedTensor(torch.zeros(size)) for name, size in (("a", 5), ("b", 3), ("c", 4))}
LARGE = {"stateful.task.buffer": CapturedTensor(torch.zeros(1000), stateful="task")}


@pytest.mark.parametrize("gathered", [True, False], ids=["sizes of all ranks", "own sizes only"])
@pytest.mark.parametrize("holder", [0, 1])
def test_each_tensor_is_written_once_if_one_rank_has_more_state_of_its_own(holder: int, gathered: bool) -> None:
    """Only rank 0's stateful objects are saved, so what rank 1 alone has is not written, and changes nothing else."""
    held = [MODEL | (LARGE if rank == holder else {}) for rank in range(2)]
    sizes = [replicated_sizes(tensors) for tensors in held]
    written = [
        shards_to_write(tensors, rank, sizes if gathered else [sizes[rank]] * 2) for rank, tensors in enumerate(held)
    ]
    names = sorted(name for shards in written for name in shards)
    assert names == sorted(MODEL | (LARGE if holder == 0 else {}))
    assert all(name in written[0] for name in LARGE if holder == 0)
    assert all(written)
