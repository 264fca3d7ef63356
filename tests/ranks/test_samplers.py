"""Samplers and `data.balance` on several ranks: every offset once, and the gradient of the whole batch."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.data.samplers import Sampled
from lockstep.data.samplers.torch_samplers import bind_sampler
from lockstep.data.windows import next_window
from lockstep.runtime.world import World
from pool import Pool
from ranks.support import Trace, WeightedRegression, assert_exact, fit, weighted_regression, windows
from ranks.test_resume import ids_by_step, train_part
from sampling import BATCH, KINDS, ONCE, Sampling

STEPS = 14


def expected(kind: str) -> list[list[int]]:
    """The samples of every step, by the sampler itself."""
    data = bind_sampler(KINDS[kind](), seed=0)
    found, position = [], 0
    for _ in range(STEPS):
        window = next_window(position, len(data), BATCH, "short")
        found.append(data.sampler.ids(window.epoch, window.start, window.stop).tolist())
        position = window.epoch * len(data) + window.stop
    return found


@pytest.mark.parametrize("kind", ["mixture", "bucketed", "curriculum", "with replacement", "without replacement"])
def test_every_offset_once_on_one_then_three_then_two_ranks(pool: Pool, tmp_path: Path, kind: str) -> None:
    """Each part of the run is preempted, the next one resumes it on another number of ranks."""
    ids = []
    values = {"run_dir": str(tmp_path), "global_batch": BATCH, "micro_batch": 2, "steps": STEPS}
    for world, preempt_at in ((1, 4), (3, 9), (2, None)):
        ids += ids_by_step(pool.run(train_part, Sampling(kind), values, preempt_at, world=world))
    assert ids == expected(kind)
    if kind in ONCE:
        assert sorted(chain(*ids[:6])) == sorted(chain(*ids[6:12])) == list(range(44))


# ---- data.balance ----

LENGTHS = np.random.default_rng(1).integers(3, 65, 40)


class Balanced(WeightedRegression):
    """Cheap samples and dear ones, by their lengths."""

    def data(self) -> Any:
        return Sampled(super().data(), lengths=LENGTHS)


def trained(world: World, store: Any, task: Balanced, values: dict[str, Any]) -> Trace:
    return fit(
        world, store, task, {"global_batch": 12, "micro_batch": 3, "steps": 5, "data.balance": "length"} | values
    )


def divided(traces: list[Trace]) -> list[dict[int, list[int]]]:
    """Of each step, the ids of every micro-batch by its index."""
    steps = zip(*(trace.steps for trace in traces), strict=True)
    return [{p.index: p.ids for note in notes for p in note.pieces if not p.padding} for notes in steps]


def test_dividing_by_length_changes_the_micro_batches_and_not_the_gradient(pool: Pool) -> None:
    task = Balanced(weighted_regression(40, seed=7).tensors)
    samples = windows(40, 12, "short", 5)
    by_world = {world: pool.run(trained, task, {}, world=world) for world in (1, 2, 3)}
    for traces in by_world.values():
        assert_exact(task, traces, samples)

    # A pure function of the step: the same micro-batches on any number of ranks.
    one = divided(by_world[1])
    assert divided(by_world[2]) == divided(by_world[3]) == one
    assert [sorted(chain(*step.values())) for step in one] == [sorted(ids) for ids in samples]
    assert len({len(ids) for ids in one[0].values()}) > 1, "all micro-batches have equally many samples"


def test_dividing_by_length_stays_exact(pool: Pool) -> None:
    """`exact=true`: the same bits on any number of ranks."""
    task = Balanced(weighted_regression(40, seed=7).tensors)
    runs = {world: pool.run(trained, task, {"exact": True}, world=world) for world in (1, 3)}
    one, three = (runs[world][0].steps[-1].weights for world in (1, 3))
    assert all(torch.equal(one[name], three[name]) for name in one)
