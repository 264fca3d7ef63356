"""The size of a checkpoint that a start compares with the free space is the size that a save writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.manifest_reader import read_manifest
from lockstep.checkpoint.state.run_state import RunState
from lockstep.checkpoint.storage.folder import CheckpointStorage, list_checkpoints
from lockstep.precision import PRECISIONS
from lockstep.runtime.world import World
from pool import Pool
from ranks.test_strategies import STRATEGIES, Listed, final

MASTER = next(name for name, precision in PRECISIONS.items() if precision.stores_bf16)


def sizes_at_start(world: World, store: Any, values: dict[str, Any]) -> tuple[int, int]:
    """A job: a short run. Return the bytes that its start counts: without the optimizers' state, and of that state."""
    counted: list[int] = []

    def watch(count: Any) -> Any:
        def watched(*arguments: Any) -> int:
            counted.append(count(*arguments))
            return counted[-1]

        return watched

    with pytest.MonkeyPatch.context() as patch:
        for name in ("bytes_without_optimizers", "estimated_optimizer_bytes"):
            patch.setattr(RunState, name, watch(getattr(RunState, name)))

        final(world, store, values, kind=Listed)

    known, estimate = counted
    return known, estimate


@pytest.mark.parametrize(
    "values",
    [
        {"strategy": "ddp"},
        {"strategy": "fsdp", "ema.decay": 0.9},
        {"strategy": "zero1", "precision": MASTER},
        STRATEGIES["tp"],
        STRATEGIES["pp"],
    ],
    ids=["ddp", "fsdp with averages", "zero1 with masters", "tp", "pp"],
)
def test_the_size_at_the_start_is_that_of_the_checkpoint(pool: Pool, tmp_path: Path, values: dict[str, Any]) -> None:
    """Every rank counts the same: all of them raise an error, or none."""
    values = values | {"run_dir": str(tmp_path / "run"), "steps": 1}
    sizes = pool.run(sizes_at_start, values, world=2)
    manifest = read_manifest(list_checkpoints(CheckpointStorage.of_run(tmp_path / "run"))[0])
    without = ("optimizer.", "stateful.data")
    saved = sum(entry.bytes for name, entry in manifest.tensors.items() if not name.startswith(without))

    # The step counts are not part of the estimate.
    moments = (".exp_avg", ".exp_avg_sq", ".momentum_buffer")
    of_optimizers = sum(entry.bytes for name, entry in manifest.tensors.items() if name.endswith(moments))
    assert of_optimizers > 0
    assert sizes == [(saved, of_optimizers)] * 2
