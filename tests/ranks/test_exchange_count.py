"""One gradient exchange per optimizer step, whatever the accumulation, and not one collective more."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from lockstep.runtime.world import World
from pool import Pool
from ranks.support import ReferenceTask, open_watched, weighted_regression

WARM, MEASURED = 3, 4  # steps; torch rearranges its buckets, with a broadcast, after the first


def collectives(world: World, store: Any, task: ReferenceTask, values: dict[str, Any]) -> dict[str, int]:
    """The collectives that torch itself recorded while MEASURED steps ran, whoever started them."""
    settings = {"steps": WARM + MEASURED + 1} | values  # the last step writes a log line, which needs one more
    recorder = profile(activities=[ProfilerActivity.CPU])
    with open_watched(world, store, settings) as builder:
        builder.setup_model(task.model(), task.optimizer)
        run = builder.setup_run(task.data(), task.collate)
        for number, batches in enumerate(run.step_batches()):
            if number == WARM:
                recorder.start()
            run.end_step(batches, run.stepper.step(batches, task.loss))
            run.log.write_if_due()
            if number + 1 == WARM + MEASURED:
                recorder.stop()
                break
    names = Counter(event.name for event in recorder.events())

    # Each call is `c10d::...`. `gloo:...` is its execution in another thread, which the profiler may miss the end of.
    return {name: count for name, count in names.items() if name.startswith("c10d::")}


@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("world", [2, 3])
def test_one_exchange_per_step(pool: Pool, world: int, accumulation: int, optimizer: str) -> None:
    batch = world * accumulation * 2
    task = weighted_regression(batch * 10, seed=9)
    task.optimizer_kind = optimizer
    for found in pool.run(collectives, task, {"global_batch": batch, "micro_batch": 2}, world=world):
        assert found == {"c10d::allreduce_": MEASURED}


def test_fp16_needs_no_more(pool: Pool) -> None:
    values = {"global_batch": 16, "micro_batch": 2, "precision": "fp16"}
    for found in pool.run(collectives, weighted_regression(160, seed=9), values, world=2):
        assert found == {"c10d::allreduce_": MEASURED}


def test_the_count_sees_every_collective(pool: Pool) -> None:
    """Where parameters may be unused, the ranks first tell each other which they used: one more."""
    values = {"global_batch": 16, "micro_batch": 2, "ddp.find_unused_parameters": True}
    for found in pool.run(collectives, weighted_regression(160, seed=9), values, world=2):
        assert found["c10d::allreduce_"] == 2 * MEASURED


def test_a_log_line_costs_one(pool: Pool) -> None:
    values = {"global_batch": 16, "micro_batch": 2, "log.every": 2}
    for found in pool.run(collectives, weighted_regression(160, seed=9), values, world=2):
        assert found["c10d::allreduce_"] == MEASURED + MEASURED // 2


def test_alone_there_is_nobody_to_talk_to(pool: Pool) -> None:
    values = {"global_batch": 16, "micro_batch": 2}
    assert pool.run(collectives, weighted_regression(160, seed=9), values, world=1) == [{}]
