"""Ranks of different speed: micro-batches follow it, and nothing else does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.engine import load_balance
from lockstep.engine.load_balance import Pace, pace_of, seconds_each
from lockstep.observe.sinks import read_jsonl
from lockstep.runtime.world import World
from lockstep.task import Loss
from pool import Pool
from ranks.support import (
    JOBS,
    Regression,
    Trace,
    assert_exact,
    assert_user_errors,
    fit,
    flat,
    weighted_regression,
    windows,
)
from ranks.test_data import Stream, collect

LENGTH, BATCH = 52, 16  # the last step of an epoch is short
VALUES = {"global_batch": BATCH, "micro_batch": 2, "steps": 30, "load_balance": "auto"}
Clock = Callable[[int, int], float]  # (rank, marks so far) -> seconds that a micro-batch takes


def ticking(clock: Clock, rank: int) -> Iterator[float]:
    now, marks = 0.0, 0
    while True:
        yield now
        now, marks = now + clock(rank, marks), marks + 1


def timed(world: World, store: Any, job: str, task: Any, values: dict[str, Any], clock: Clock) -> Trace:
    """A job whose measurements come from `clock`, twice in a run."""
    ticks = ticking(clock, world.rank)
    load_balance._now, load_balance.PERIOD = lambda device: next(ticks), 12
    return JOBS[job](world, store, task, values)


def work(traces: list[Trace], step: int) -> tuple[int, ...]:
    return tuple(sum(not piece.padding for piece in trace.steps[step].pieces) for trace in traces)


def ids(traces: list[Trace], step: int) -> list[int]:
    pieces = [piece for trace in traces for piece in trace.steps[step].pieces if not piece.padding]
    return [i for piece in sorted(pieces, key=lambda piece: piece.index) for i in piece.ids]


def third_as_fast(rank: int, marks: int) -> float:
    return 0.3 if rank == 1 else 0.1


def turned_round(rank: int, marks: int) -> float:
    """After the first measurement (3 steps with 5 marks, 2 with 2) the other rank is the slow one."""
    return 0.3 if (rank == 1) == (marks < 19) else 0.1


@pytest.mark.parametrize(("job", "workers"), [("fit", 0), ("fit", 2), ("own loop", 0)])
def test_the_assignment_follows_the_speed_and_the_numbers_do_not(pool: Pool, job: str, workers: int) -> None:
    task = weighted_regression(LENGTH, seed=3)
    traces = pool.run(timed, job, task, VALUES | {"data.workers": workers}, third_as_fast, world=2)
    assert work(traces, 0) == (4, 4)
    assert work(traces, 26) == (6, 2)
    counts = [work(traces, step) for step in range(30) if step % 4 != 3]  # of whole windows
    assert sorted(set(counts)) == [(4, 4), (6, 2)]
    changed = counts.index((6, 2))
    assert set(counts[changed:]) == {(6, 2)}, "ranks changed their assignment at different steps"
    assert changed > 6 if workers else changed == 6, "it is known after step 7; workers have read ahead by then"
    assert_exact(task, traces, windows(LENGTH, BATCH, "short", 30))
    assert [ids(traces, step) for step in range(30)] == windows(LENGTH, BATCH, "short", 30)


def test_an_assignment_is_taken_back_when_the_other_rank_gets_slow(pool: Pool, tmp_path: Path) -> None:
    """With workers that are ahead: those of the rank with less to do by more steps."""
    task = weighted_regression(LENGTH, seed=4)
    values = VALUES | {"run_dir": str(tmp_path / "run"), "data.workers": 2}
    traces = pool.run(timed, "fit", task, values, turned_round, world=2)
    assert [work(traces, step) for step in (6, 14, 29)] == [(4, 4), (6, 2), (2, 6)]
    assert_exact(task, traces, windows(LENGTH, BATCH, "short", 30))
    balanced = [line for line in read_jsonl(tmp_path / "run" / "events.jsonl") if line["event"] == "balance"]
    assert [line["step"] for line in balanced] == [8, 20]
    assert balanced[0]["reason"] == (
        "rank 1 is 3.0x slower than rank 0: micro-batches 6 + 2 instead of 4 + 4, step 1.2 s -> 0.6 s expected"
    )
    assert "rank 0 is 3.0x slower than rank 1: micro-batches 2 + 6 instead of 6 + 2" in balanced[1]["reason"]


def a_little_slower(rank: int, marks: int) -> float:
    return 0.1 + 0.008 * rank


def test_a_small_difference_changes_nothing(pool: Pool) -> None:
    values = VALUES | {"micro_batch": 1, "steps": 12}
    traces = pool.run(timed, "fit", weighted_regression(64, seed=5), values, a_little_slower, world=2)
    assert {work(traces, step) for step in range(12)} == {(8, 8)}


def test_numbers_that_are_given_count_at_once(pool: Pool) -> None:
    task = weighted_regression(LENGTH, seed=6)
    traces = pool.run(fit, task, VALUES | {"load_balance": [1, 2, 5], "steps": 8}, world=3)
    assert [work(traces, step) for step in (0, 3)] == [(1, 2, 5), (0, 0, 2)]
    assert_exact(task, traces, windows(LENGTH, BATCH, "short", 8))


def test_a_resumed_run_measures_again_on_another_number_of_ranks(pool: Pool, tmp_path: Path) -> None:
    task = weighted_regression(LENGTH, seed=7)
    (whole,) = pool.run(fit, task, VALUES | {"load_balance": "none"}, world=1)
    values = VALUES | {"run_dir": str(tmp_path / "run"), "resume": "auto"}
    first = pool.run(timed, "fit", task, values | {"steps": 15}, third_as_fast, world=2)
    second = pool.run(timed, "fit", task, values, third_as_fast, world=3)
    assert work(first, 14) == (6, 2)
    assert work(second, 1) == (2, 3, 3)
    assert work(second, 9) == (4, 1, 3), "measured again"
    assigned = [ids(first, step) for step in range(15)] + [ids(second, step) for step in range(15)]
    assert assigned == windows(LENGTH, BATCH, "short", 30)
    for trace in second:
        torch.testing.assert_close(flat(trace.steps[-1].weights), flat(whole.steps[-1].weights), rtol=1e-5, atol=1e-7)


class SlowSecondRank(Regression):
    """Really slow: it sleeps. Everything else takes about a millisecond."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        time.sleep(0.03 * dist.get_rank())
        return super().loss(model, batch)


def test_a_rank_that_is_really_slow(pool: Pool) -> None:
    values = {"global_batch": 8, "micro_batch": 1, "steps": 10, "load_balance": "auto"}
    traces = pool.run(fit, SlowSecondRank(), values, world=2)
    assert work(traces, 0) == (4, 4)
    fast, slow = work(traces, 9)
    assert fast > slow >= 1


def test_what_is_measured() -> None:
    """Two steps of three micro-batches: reading, forward and backward take 2 s, the last forward 0.5 s."""
    assert pace_of([[10.0, 12.0, 14.0, 14.5], [20.0, 22.0, 24.0, 24.5]]) == Pace(2.0, 0.5)
    assert pace_of([[10.0, 11.0], [15.0, 17.0], [30.0, 31.0]]) == Pace(None, 1.0)
    assert seconds_each([Pace(3.0, 1.0), Pace(None, 2.0)]) == [3.0, 6.0]
    assert seconds_each([Pace(None, 1.0), Pace(None, 2.0)]) == [1.0, 2.0]


def test_a_stream_is_refused(pool: Pool) -> None:
    values = {"global_batch": 8, "micro_batch": 1, "steps": 2, "load_balance": "auto"}
    assert_user_errors(pool.errors(collect, Stream(40), values, world=2), "a stream", "leave load_balance out")
