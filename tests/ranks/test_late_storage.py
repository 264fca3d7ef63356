"""Storage that shows the newest files late to one rank, as NFS and some object stores do: the run resumes all the same.

Nothing may be lost by it: no checkpoint is called damaged, and the run does not resume from an older one.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.loading import search
from lockstep.checkpoint.storage import retry
from lockstep.checkpoint.storage.folder import CheckpointStorage
from lockstep.runtime.world import World
from pool import Pool
from ranks.test_strategies import final

STEPS = {"steps": 6, "checkpoint.every": 2, "checkpoint.keep": 5}
NEWEST = "step-00000004"
LOOKS = 8  # how many times a rank looks before it sees what is new; a claim looks a few times, too


class LateStorage:
    """What one rank sees. Everything else is as it is."""

    def __init__(self, hides: Callable[[str], bool]):
        self.hides = hides
        self.looks = Counter[str]()

    def is_late(self, name: str) -> bool:
        if not self.hides(name) or self.looks[name] == LOOKS:
            return False
        self.looks[name] += 1
        return True

    def install(self, patch: pytest.MonkeyPatch) -> None:
        open_file, folders = CheckpointStorage.open, CheckpointStorage.folders

        def open_late(storage: CheckpointStorage, key: str) -> Any:
            if self.is_late(key):
                raise FileNotFoundError(2, "No such file or directory", key)
            return open_file(storage, key)

        def list_late(storage: CheckpointStorage) -> list[str]:
            return [name for name in folders(storage) if not self.is_late(name)]

        patch.setattr(CheckpointStorage, "open", open_late)
        patch.setattr(CheckpointStorage, "folders", list_late)


def resumed_late(world: World, store: Any, values: dict[str, Any], late_rank: int, late: str) -> dict[str, Any]:
    """A job: a run that resumes while one rank sees `late`, a folder or a file in it, only after some looks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "LOOK_PAUSE_S", 0.01)
        patch.setattr(retry, "FIRST_PAUSE_S", 0.01)
        storage = LateStorage(lambda name: name == late and world.rank == late_rank)
        storage.install(patch)
        return final(world, store, values | {"resume": "auto"}) | {"looks": storage.looks[late]}


@pytest.fixture(scope="module")
def interrupted(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that has left after step 4, with checkpoints of steps 2 and 4."""
    run = tmp_path_factory.mktemp("interrupted") / "run"
    left = pool.run(final, STEPS | {"run_dir": str(run)}, 4, world=2)
    assert left[0]["summary"] == {"left": 4}
    return run


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, interrupted: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    run = shutil.copytree(interrupted, tmp_path_factory.mktemp("undisturbed") / "run")
    return pool.run(final, STEPS | {"run_dir": str(run), "resume": "auto"}, world=2)[0]["weights"]


@pytest.mark.parametrize("late_rank", [0, 1])
@pytest.mark.parametrize(
    "late",
    [NEWEST, *(f"{NEWEST}/{name}" for name in ("manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"))],
    ids=["folder", "manifest", "file-of-rank-0", "file-of-rank-1"],
)
def test_a_restore_waits_for_files_that_one_rank_sees_late(
    pool: Pool,
    interrupted: Path,
    undisturbed: dict[str, torch.Tensor],
    tmp_path: Path,
    late_rank: int,
    late: str,
) -> None:
    run = shutil.copytree(interrupted, tmp_path / "run")
    found = pool.run(resumed_late, STEPS | {"run_dir": str(run)}, late_rank, late, world=2)
    assert found[late_rank]["looks"] == LOOKS
    assert all(rank["resumed"] for rank in found)
    for name, weight in undisturbed.items():
        assert torch.equal(found[0]["weights"][name], weight), name

    names = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert names == ["step-00000002", NEWEST, "step-00000006"]
