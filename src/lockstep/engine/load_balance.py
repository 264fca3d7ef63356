"""Ranks of different speeds: a faster rank gets more of a step's micro-batches, so that all finish together.

This does not change the result. A micro-batch has the same samples and random numbers on any rank, and sums are divided
once; so the assignment of micro-batches to ranks may change between two steps, if it changes on all ranks at once.
Worker processes read ahead, so a new assignment takes effect at a later position in the data, which all ranks agree on
first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch

from lockstep.data.shard import rank_counts, rank_range
from lockstep.data.sources import MapSource
from lockstep.errors import UserError, plural
from lockstep.parallel.batchnorm.sync import is_synchronised
from lockstep.parallel.driver import Driver
from lockstep.plan.plan import Plan
from lockstep.runtime.context import EventLogger, Runtime
from lockstep.task import BatchSource

WARM_UP = 3  # steps that are not measured: they compile, allocate, connect
MEASURED = 5  # steps after them
PERIOD = 100  # steps from one measurement to the next
MIN_GAIN = 0.1  # of a step: less may be noise, and is not worth a change
SHOWN_RANKS = 16  # in an assignment that is printed

Speeds = str | Sequence[float]  # `load_balance`


class Pace(NamedTuple):
    """The seconds of one micro-batch on one rank, with the wait for its data and without the gradient all-reduce."""

    whole: float | None  # forward and backward; None with one micro-batch a step, whose backward has the all-reduce
    forward: float


def plan_by_speed(plan: Plan, speeds: Speeds) -> Plan:
    """Return the plan, changed to fit `load_balance`, or refuse it."""
    if speeds == "none":
        return plan

    if not isinstance(speeds, str) and len(speeds) != plan.data_size:
        raise UserError(
            f"load_balance={list(speeds)} has {plural(len(speeds), 'number')} for {plural(plan.data_size, 'rank')}",
            "",
            "give one number for each rank, or type load_balance=auto",
        )

    if plan.data_size > 1 and plan.micro_batches <= plan.data_size:
        # About four micro-batches for each rank leave room to balance speeds that differ by a quarter.
        smaller = max(1, plan.global_batch // (4 * plan.data_size))
        larger_batch = f"type global_batch={4 * plan.data_size} or more, and micro_batch=1"
        raise UserError(
            f"load_balance cannot assign {plan.micro_batches} micro-batches to {plan.data_size} ranks",
            "one for each, and none to move",
            f"type micro_batch={smaller}" if smaller < plan.micro_batch else larger_batch,
        )

    # With `auto` the first steps are assigned evenly, as the plan says.
    if isinstance(speeds, str):
        return plan
    most = max(rank_counts(plan.micro_batches, tuple(speeds)))
    return replace(plan, accumulation=most, reasons=plan.reasons | {"accumulation": "assigned by load_balance"})


def describe_speeds(speeds: Speeds, plan: Plan) -> str:
    if isinstance(speeds, str):
        return f"measured in steps {WARM_UP} to {WARM_UP + MEASURED - 1}; then micro-batches are assigned by them"
    return f"micro-batches {_show(rank_counts(plan.micro_batches, tuple(speeds)))} by load_balance"


def open_load_balancer(
    speeds: Speeds, plan: Plan, source: BatchSource, driver: Driver, runtime: Runtime, log_event: EventLogger
) -> LoadBalancer | None:
    """Return a balancer that measures speeds, with `auto`. Speeds that are given are applied now, and stay."""
    if speeds == "none" or plan.data_size == 1:
        return None

    # From here on ranks run different numbers of micro-batches.
    if not isinstance(source, MapSource):
        raise UserError(
            f"load_balance cannot be used with data from a {type(source).__name__}",
            "every rank reads its own samples of a stream, or of a custom source",
            "return a dataset with __getitem__ and a length from data(), or leave load_balance out",
        )

    if any(map(is_synchronised, driver.model.modules())):
        raise UserError(
            "load_balance cannot be used with SyncBatchNorm",
            "it gives ranks different numbers of micro-batches, and the forward of SyncBatchNorm waits for all ranks",
            "use GroupNorm or LayerNorm, or leave load_balance out",
        )

    if isinstance(speeds, str):
        return LoadBalancer(plan, source, runtime, log_event)
    source.assign_by(speeds)
    return None


class LoadBalancer:
    """Measures the seconds of a micro-batch on each rank and assigns again where that makes steps shorter."""

    def __init__(self, plan: Plan, source: MapSource, runtime: Runtime, log_event: EventLogger):
        self._micro_batches = plan.micro_batches
        self._source = source
        self._runtime = runtime
        self._log_event = log_event
        self.assigned = tuple(
            len(rank_range(plan.micro_batches, rank, plan.data_size)) for rank in range(plan.data_size)
        )
        self._ended = 0  # steps of this process: the same number on all ranks
        self._marks: list[list[Any]] = [[]]  # moments of every measured step, and of the one that runs

    def mark(self) -> None:
        """Note the time: a micro-batch begins, or the gradient all-reduce does."""
        if self._measures:
            self._marks[-1].append(_now(self._runtime.device))

    def end_step(self, step: int) -> None:
        """End a step and assign again after the last one of a measurement."""
        # We count the steps of this process, not those of the run: a resumed run measures its own ranks.
        if self._measures:
            self._marks.append([])
        self._ended += 1
        if self._ended % PERIOD == WARM_UP + MEASURED:
            self._assign_again(step, pace_of(self._marks[:-1]))
            self._marks = [[]]

    @property
    def _measures(self) -> bool:
        return WARM_UP <= self._ended % PERIOD < WARM_UP + MEASURED

    def _assign_again(self, step: int, own: Pace) -> None:
        """Change the assignment if it pays. Collective: all ranks gather the same figures, and so decide alike."""
        # Worker processes have already read batches of the present one, so ranks also send where it ends for them.
        gathered = self._runtime.collectives.gather_json([own, self._source.assigned_until])
        seconds = seconds_each([Pace(*pace) for pace, _ in gathered])
        speeds = tuple(1.0 / s for s in seconds)
        better = rank_counts(self._micro_batches, speeds)

        # A small gain may be noise.
        now_s = step_seconds(self.assigned, seconds)
        then_s = step_seconds(better, seconds)
        if then_s > (1.0 - MIN_GAIN) * now_s:
            return

        # No rank's workers have read as far as this position.
        self._source.assign_by(speeds, max(position for _, position in gathered))

        slow = seconds.index(max(seconds))
        fast = seconds.index(min(seconds))
        self._log_event(
            "balance",
            step=step,
            reason=f"rank {slow} is {seconds[slow] / seconds[fast]:.1f}x slower than rank {fast}: micro-batches "
            f"{_show(better)} instead of {_show(self.assigned)}, step {now_s:.2g} s -> {then_s:.2g} s expected",
        )
        self.assigned = better


def pace_of(steps: Sequence[Sequence[Any]]) -> Pace:
    """Return the pace over some steps. Each has the moments when its micro-batches and its all-reduce began."""
    # Between the first and the last micro-batch lie forwards and backwards only; in the last one, up to the all-reduce,
    # a forward only.
    wholes = [_seconds(marks[0], marks[-2]) / (len(marks) - 2) for marks in steps if len(marks) > 2]
    forwards = [_seconds(marks[-2], marks[-1]) for marks in steps]
    return Pace(median(wholes) if wholes else None, median(forwards))


def seconds_each(paces: Sequence[Pace]) -> list[float]:
    """Return the seconds of one micro-batch, by rank.

    A rank with one micro-batch a step measured only its forward; the others know how much longer the whole takes.
    """
    # 1e-9: no division by zero, should a clock not advance.
    ratios = [pace.whole / max(pace.forward, 1e-9) for pace in paces if pace.whole is not None]
    usual = median(ratios) if ratios else 1.0
    return [max(1e-9, pace.forward * usual if pace.whole is None else pace.whole) for pace in paces]


def step_seconds(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the seconds of a step, which takes as long as its slowest rank."""
    return max(n * s for n, s in zip(counts, seconds, strict=True))


def _show(counts: Sequence[int]) -> str:
    """`2 + 6`"""
    return " + ".join(map(str, counts[:SHOWN_RANKS])) + " + ..." * (len(counts) > SHOWN_RANKS)


def _now(device: torch.device) -> Any:
    """Return a moment in the device's own time: the host runs ahead of a GPU."""
    if device.type != "cuda":
        return time.perf_counter()
    # An event costs the host nothing: its time is read when the measurement is over.
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return end - begin
    end.synchronize()  # the host waits for the device: once in a measurement
    return begin.elapsed_time(end) / 1000
