"""fp16 under every strategy: an overflow on one rank skips the step on all, halves the scale, and leaves no trace."""

from __future__ import annotations

import os
from typing import Any

import pytest

from lockstep import faults
from lockstep.engine import loop
from lockstep.engine.end import full_state
from lockstep.engine.run import Run
from lockstep.engine.setup import open_run
from lockstep.runtime import context
from lockstep.runtime.world import World
from pool import Pool
from ranks.support import configured
from ranks.test_strategies import BASE, STRATEGIES, Ragged

BAD, SCALE = 2, 1024.0
FP16 = {"precision": "fp16", "scaler.initial": SCALE, "scaler.interval": 100, "steps": 4}


def overflowed(world: World, store: Any, values: dict[str, Any], bad_rank: int) -> dict[str, Any]:
    """A job: the loss of one rank is infinite in one step."""
    os.environ["RANK"] = str(world.rank)
    os.environ[faults.VARIABLE] = faults.to_text([faults.Fault("inf", rank=bad_rank, step=BAD)])
    faults.reset()
    resolved = configured(BASE | FP16 | values)
    with context.start(world, resolved.config, store=store) as runtime:
        applied, scales = [], []

        class NotedRun(Run):
            def end_step(self, batches: Any, result: Any) -> None:
                applied.append(result.applied)
                scales.append(self.stepper.scaler.value)
                super().end_step(batches, result)

        builder = open_run(resolved, runtime, "test", run_class=NotedRun)
        loop.fit(Ragged(), builder)
        weights, _ = full_state(builder.driver, keep=True)
        return {"applied": applied, "scales": scales, "weights": {name: t.cpu().clone() for name, t in weights.items()}}


@pytest.fixture(scope="module")
def single(pool: Pool) -> dict[str, Any]:
    return pool.run(overflowed, {}, 0, world=1)[0]


# Whose loss it is: in a pipeline only the last stage has one.
CASES = [(name, 2, 1) for name in ("ddp", "unused", "zero1", "fsdp", "fsdp-grads", "tp", "pp")]
CASES += [("hsdp", 4, 1), ("fsdp x tp", 4, 1), ("pp gpipe x dp", 4, 3)]


@pytest.mark.parametrize(("name", "world", "bad_rank"), CASES, ids=lambda value: str(value))
def test_all_ranks_skip_together(pool: Pool, single: dict[str, Any], name: str, world: int, bad_rank: int) -> None:
    good = [step != BAD for step in range(FP16["steps"])]
    for found in [single, *pool.run(overflowed, STRATEGIES[name], bad_rank, world=world)]:
        assert found["applied"] == good
        assert found["scales"] == [SCALE] * BAD + [SCALE / 2] * (len(good) - BAD)
        for key, expected in single["weights"].items():
            # fp16 keeps 11 bits of a number: sums in another order differ by about 1e-3 of a gradient, and Adam moves
            # by the learning rate whatever the gradient's size. A step that was not skipped would be off by 1e-1.
            error = float((found["weights"][key] - expected).norm() / expected.norm())
            assert error < 1e-2, f"{key}: off by {error:.1e}"
