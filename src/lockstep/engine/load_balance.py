"""Load balancing: a faster rank gets more of a step's micro-batches, so that all ranks finish together.

This does not change the result. A micro-batch has the same samples and random numbers on any rank, and sums are divided
once. So the assignment of micro-batches to ranks may change between two steps, if it changes on all ranks at once.
Worker processes prefetch, so a new assignment takes effect at a later position in the data, on which all ranks agree.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch

from lockstep.data.windows import StepOrder, rank_counts, rank_range
from lockstep.errors import UserError, plural
from lockstep.parallel.driver import Driver
from lockstep.parallel.progress import PassProgress
from lockstep.parallel.step_parts import StepPart
from lockstep.plan.plan import Plan
from lockstep.runtime.context import EventLogger, Runtime
from lockstep.task import BatchSource

WARM_UP = 3  # the first steps are not measured: they compile, allocate and connect
MEASURED = 5  # steps per measurement
PERIOD = 100  # steps from one measurement to the next
MIN_GAIN = 0.1  # as a fraction of a step: a smaller gain may be noise
SHOWN_RANKS = 16  # a printed assignment names at most this many ranks

Speeds = str | Sequence[float]  # `load_balance`


class Pace(NamedTuple):
    """Seconds per micro-batch on one rank, including the wait for data, without the gradient all-reduce."""

    whole: float | None  # forward and backward; None if a step has one micro-batch, whose backward all-reduces
    forward: float


def plan_by_speed(plan: Plan, speeds: Speeds) -> Plan:
    """Return the plan with the accumulation that `load_balance` needs. Raise if the plan does not allow it."""
    if speeds == "none":
        return plan

    if not isinstance(speeds, str) and len(speeds) != plan.data_size:
        raise UserError(
            f"load_balance={list(speeds)} has {plural(len(speeds), 'number')} for {plural(plan.data_size, 'rank')}",
            "",
            "give one number for each rank, or set load_balance=auto",
        )

    if plan.data_size > 1 and plan.global_num_micro_batches <= plan.data_size:
        # About four micro-batches for each rank leave room to balance speeds that differ by a quarter.
        smaller = max(1, plan.global_batch // (4 * plan.data_size))
        larger_batch = f"set global_batch={4 * plan.data_size} or more, and micro_batch=1"
        raise UserError(
            f"load_balance cannot assign {plan.global_num_micro_batches} micro-batches to {plan.data_size} ranks",
            "each rank has at most one, so none can be moved",
            f"set micro_batch={smaller}" if smaller < plan.micro_batch else larger_batch,
        )

    # With `auto` the first steps are assigned evenly, as the plan already does.
    if isinstance(speeds, str):
        return plan

    accumulation = max(rank_counts(plan.global_num_micro_batches, tuple(speeds)))
    return replace(plan, accumulation=accumulation, reasons=plan.reasons | {"accumulation": "assigned by load_balance"})


def describe_speeds(speeds: Speeds, plan: Plan) -> str:
    if isinstance(speeds, str):
        return f"measured in {MEASURED} steps after the first {WARM_UP}; then micro-batches are assigned by them"

    return f"micro-batches {_show(rank_counts(plan.global_num_micro_batches, tuple(speeds)))} by load_balance"


def balance_load(
    speeds: Speeds, plan: Plan, source: BatchSource, driver: Driver, runtime: Runtime, log_event: EventLogger
) -> None:
    """Apply the speeds of the configuration, once; with `load_balance=auto` let a balancer measure the steps."""
    if speeds == "none" or plan.data_size == 1:
        return

    # Ranks will run different numbers of micro-batches.
    if source.step_order is None:
        raise UserError(
            f"load_balance cannot be used with data from a {type(source).__name__}",
            "every rank reads its own samples of a stream, or of a custom source",
            "return a dataset with __getitem__ and a length from data(), or leave load_balance out",
        )

    # config/conflicts.py has refused the settings that lead to this, but not a SyncBatchNorm in the user's model.
    if driver.role.collective_forwards:
        raise UserError(
            "load_balance cannot be used with SyncBatchNorm",
            "it gives ranks different numbers of micro-batches, and the forward of SyncBatchNorm waits for all ranks",
            "use GroupNorm or LayerNorm, or leave load_balance out",
        )

    if isinstance(speeds, str):
        driver.parts.add(LoadBalancer(plan, source.step_order, runtime, log_event))
    else:
        source.step_order.assign_by(speeds)


class LoadBalancer(StepPart):
    """Measures the speed of each rank, and reassigns micro-batches if that makes steps shorter."""

    slot = "balance"

    def __init__(self, plan: Plan, order: StepOrder, runtime: Runtime, log_event: EventLogger):
        self._num_micro_batches = plan.global_num_micro_batches
        self._order = order
        self._runtime = runtime
        self._log_event = log_event

        # How many micro-batches of a step each rank has; before any measurement, all about the same.
        self.assigned = tuple(
            len(rank_range(plan.global_num_micro_batches, rank, plan.data_size)) for rank in range(plan.data_size)
        )

        self._ended = 0  # steps of this process so far: the same number on all ranks
        self._marks: list[list[Any]] = [[]]  # a list of times for each measured step, the current one last

    def begin_micro_batch(self) -> None:
        self._mark()

    def before_all_reduce(self) -> None:
        self._mark()

    def _mark(self) -> None:
        if self._is_measuring:
            self._marks[-1].append(_now(self._runtime.device))

    def end_step(self, progress: PassProgress) -> None:
        """End a step, and reassign micro-batches after the last step of a measurement."""
        # Count the steps of this process, not those of the run: a resumed run may have other ranks.
        if self._is_measuring:
            self._marks.append([])

        self._ended += 1

        if self._ended % PERIOD == WARM_UP + MEASURED:
            self._reassign(progress.step + 1, pace_of(self._marks[:-1]))
            self._marks = [[]]

    @property
    def _is_measuring(self) -> bool:
        return WARM_UP <= self._ended % PERIOD < WARM_UP + MEASURED

    def _reassign(self, steps_done: int, own: Pace) -> None:
        """Change the assignment if that pays. Collective: all ranks gather the same times and decide alike."""
        # Workers have already read batches of the current assignment, so ranks also send how far they have read.
        gathered = self._runtime.collectives.all_gather_json([own, self._order.assigned_until])
        seconds = seconds_each([Pace(*pace) for pace, _ in gathered])
        speeds = tuple(1.0 / s for s in seconds)
        better = rank_counts(self._num_micro_batches, speeds)

        # A small gain may be noise.
        now_s = step_seconds(self.assigned, seconds)
        then_s = step_seconds(better, seconds)
        if then_s > (1.0 - MIN_GAIN) * now_s:
            return

        # No rank has read beyond the largest position.
        self._order.assign_by(speeds, max(position for _, position in gathered))

        slow = seconds.index(max(seconds))
        fast = seconds.index(min(seconds))

        self._log_event(
            "balance",
            step=steps_done,
            reason=f"rank {slow} is {seconds[slow] / seconds[fast]:.1f}x slower than rank {fast}: micro-batches "
            f"{_show(better)} instead of {_show(self.assigned)}, step {now_s:.2g} s -> {then_s:.2g} s expected",
        )
        self.assigned = better


def pace_of(steps: Sequence[Sequence[Any]]) -> Pace:
    """Return the pace over some steps, each with the times when its micro-batches and then its all-reduce began."""
    wholes: list[float] = []
    forwards: list[float] = []
    for marks in steps:
        *begins, all_reduce = marks

        # The last micro-batch is measured up to the all-reduce, so it has a forward only.
        forwards.append(_seconds(begins[-1], all_reduce))

        # All others have a forward and a backward.
        if len(begins) > 1:
            wholes.append(_seconds(begins[0], begins[-1]) / (len(begins) - 1))

    # The median ignores a step that something else slowed down.
    return Pace(median(wholes) if wholes else None, median(forwards))


def seconds_each(paces: Sequence[Pace]) -> list[float]:
    """Return the seconds per micro-batch, by rank.

    A rank with one micro-batch per step measured only its forward. The ratio of whole to forward comes from the others.
    """
    # 1e-9 avoids a division by zero if the clock did not advance.
    ratios = [pace.whole / max(pace.forward, 1e-9) for pace in paces if pace.whole is not None]
    ratio = median(ratios) if ratios else 1.0

    seconds = []
    for pace in paces:
        whole = pace.forward * ratio if pace.whole is None else pace.whole
        seconds.append(max(1e-9, whole))

    return seconds


def step_seconds(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the seconds of a step, which takes as long as its slowest rank."""
    return max(n * s for n, s in zip(counts, seconds, strict=True))


def _show(counts: Sequence[int]) -> str:
    """`2 + 6`"""
    text = " + ".join(map(str, counts[:SHOWN_RANKS]))
    return f"{text} + ..." if len(counts) > SHOWN_RANKS else text


def _now(device: torch.device) -> Any:
    """Return the current time: a CUDA event on a GPU, because the host runs ahead of it."""
    if device.type != "cuda":
        return time.perf_counter()

    # The host does not wait for an event. Its time is read when the measurement is over.
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Any, end: Any) -> float:
    """Return the seconds between two times of `_now`."""
    if isinstance(begin, float):
        return end - begin

    end.synchronize()  # the host waits for the device: once in a measurement
    return begin.elapsed_time(end) / 1000
