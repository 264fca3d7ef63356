"""The learning rate of every step is a function of the configuration, never of the number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.optim.schedule import SCHEDULES
from pool import Pool
from ranks.support import JOBS, weighted_regression

STEPS, WARMUP, PEAK, FLOOR = 12, 4, 0.3, 0.1
BASE = {
    "global_batch": 8,
    "micro_batch": 2,
    "steps": STEPS,
    "lr.peak": PEAK,
    "lr.warmup": WARMUP,
    "lr.min_ratio": FLOOR,
}
RISE = [PEAK * (n + 1) / (WARMUP + 1) for n in range(WARMUP)]


def curves(pool: Pool, values: dict[str, Any], world: int, job: str = "fit") -> list[list[float]]:
    traces = pool.run(JOBS[job], weighted_regression(40, seed=5, zeros=0.0), BASE | values, world=world)
    for trace in traces:
        assert all(note.result.applied for note in trace.steps)
        assert [note.optimizer_lrs for note in trace.steps] == [[note.lr] for note in trace.steps]
    return [[note.lr for note in trace.steps] for trace in traces]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_curve_is_the_same_at_any_world_size(pool: Pool, schedule: str) -> None:
    one = curves(pool, {"lr.schedule": schedule}, world=1)[0]
    assert one[:WARMUP] == pytest.approx(RISE)
    assert one[WARMUP] == pytest.approx(PEAK)
    assert one[-1] == pytest.approx(PEAK if schedule == "constant" else PEAK * FLOOR)
    assert max(one) <= PEAK * (1 + 1e-12)
    for world in (2, 4):
        for job in JOBS:
            assert curves(pool, {"lr.schedule": schedule}, world, job) == [one] * world


@pytest.mark.parametrize(("rule", "factor"), [("linear", 2.0), ("sqrt", 2.0**0.5)])
def test_scaling_follows_the_global_batch_alone(pool: Pool, rule: str, factor: float) -> None:
    scaling = {"lr.scaling": rule, "lr.reference_batch": 4, "lr.schedule": "constant"}
    one = curves(pool, scaling, world=1)[0]
    assert one[WARMUP] == pytest.approx(PEAK * factor)
    for world in (2, 4):
        assert curves(pool, scaling, world) == [one] * world
