"""Ranks of different speed: every rank gets as many micro-batches of a step as it does in the time of the others.

What comes out does not depend on it. A micro-batch has the same samples and random numbers whoever runs it, and sums
are divided once; so the deal may change between any two steps, if it changes for all ranks at once. That is why it is
a position in the data, agreed on beforehand, from which on a new deal counts: loader processes read ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.data.shard import apportion, deal
from lockstep.data.sources import MapSource
from lockstep.errors import UserError
from lockstep.parallel.driver import Driver
from lockstep.plan.plan import Plan
from lockstep.runtime.context import Runtime
from lockstep.task import BatchSource

WARM_UP = 3  # steps that are not measured: they compile, allocate, connect
MEASURED = 5  # steps after them
AGAIN = 100  # steps from one measurement to the next
LEAST_GAIN = 0.1  # of a step: less may be noise, and is not worth a change
Speeds = str | Sequence[float]  # `load_balance`


class Pace(NamedTuple):
    """What a micro-batch takes of one rank, in seconds, with the wait for its data and without the exchange."""

    whole: float | None  # forward and backward; None: of one in a step, whose backward has the exchange in it
    forward: float


def by_speed(plan: Plan, speeds: Speeds) -> Plan:
    """The plan with what follows from `load_balance`, or a refusal."""
    if speeds == "none":
        return plan
    if not isinstance(speeds, str) and len(speeds) != plan.world:
        raise UserError(
            f"load_balance={list(speeds)}",
            f"{len(speeds)} numbers for {plan.world} rank{'s' * (plan.world > 1)}",
            "give one number for each rank, or type load_balance=auto",
        )
    if plan.world > 1 and plan.micro_batches <= plan.world:
        smaller = max(1, plan.global_batch // (4 * plan.world))
        fits = smaller < plan.micro_batch
        raise UserError(
            "load_balance: micro-batches dealt by speed",
            f"{plan.micro_batches} micro-batches for {plan.world} ranks: one for each, and none to move",
            f"type micro_batch={smaller}" if fits else f"type global_batch={4 * plan.world} or more, and micro_batch=1",
        )
    if isinstance(speeds, str):
        return plan
    most = max(apportion(plan.micro_batches, tuple(speeds)))
    return replace(plan, accumulation=most, reasons=plan.reasons | {"accumulation": "dealt by load_balance"})


def about_speeds(speeds: Speeds, plan: Plan) -> str:
    """Told before the first step."""
    if isinstance(speeds, str):
        return f"measured in steps {WARM_UP} to {WARM_UP + MEASURED - 1}; then micro-batches are dealt by them"
    return f"micro-batches {_dealt(apportion(plan.micro_batches, tuple(speeds)))} by load_balance"


def open_dealer(
    speeds: Speeds, plan: Plan, source: BatchSource, driver: Driver, runtime: Runtime, tell: Callable[..., None]
) -> LoadBalancer | None:
    """Whoever measures, with `auto`. Given numbers count at once, and stay."""
    if speeds == "none" or plan.world == 1:
        return None
    _check_can_be_uneven(source, driver.model)
    assert isinstance(source, MapSource)
    if isinstance(speeds, str):
        return LoadBalancer(plan, source, runtime, tell)
    source.deal_by(speeds)
    return None


def _check_can_be_uneven(source: BatchSource, model: nn.Module) -> None:
    if not isinstance(source, MapSource):
        raise UserError(
            "load_balance: micro-batches dealt by speed",
            "a stream, or a source of your own: every rank reads its own samples, and nobody can deal them anew",
            "return a dataset with __getitem__ and a length from data(), or leave load_balance out",
        )
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise UserError(
            "load_balance: ranks that run different numbers of micro-batches",
            "SyncBatchNorm, whose forward waits for all ranks",
            "use GroupNorm or LayerNorm, or leave load_balance out",
        )


class LoadBalancer:
    """Measures what a micro-batch takes of each rank, and deals anew where that makes steps shorter."""

    def __init__(self, plan: Plan, source: MapSource, runtime: Runtime, tell: Callable[..., None]):
        self._count, self._source, self._runtime, self._tell = plan.micro_batches, source, runtime, tell
        self.dealt = tuple(len(deal(plan.micro_batches, rank, plan.world)) for rank in range(plan.world))
        self._ended = 0  # steps, by this process: the same on all ranks
        self._marks: list[list[Any]] = [[]]  # of every measured step, and of the one that runs

    def mark(self) -> None:
        """A micro-batch begins, or the exchange does."""
        if self._measures:
            self._marks[-1].append(_now(self._runtime.device))

    def end_step(self, step: int) -> None:
        if self._measures:
            self._marks.append([])
        self._ended += 1
        if self._ended % AGAIN == WARM_UP + MEASURED:
            self._agree(step, pace_of(self._marks[:-1]))
            self._marks = [[]]

    @property
    def _measures(self) -> bool:
        return WARM_UP <= self._ended % AGAIN < WARM_UP + MEASURED

    def _agree(self, step: int, mine: Pace) -> None:
        """All ranks hear the same figures, and come to the same deal."""
        everybody = self._runtime.collectives.gather_json([mine, self._source.dealt_until])
        seconds = seconds_each([Pace(*pace) for pace, _ in everybody])
        weights = tuple(1.0 / s for s in seconds)
        better = apportion(self._count, weights)
        now, then = longest(self.dealt, seconds), longest(better, seconds)
        if then > (1.0 - LEAST_GAIN) * now:
            return
        # Nobody's workers have read as far as this.
        self._source.deal_by(weights, max(position for _, position in everybody))
        slow, fast = seconds.index(max(seconds)), seconds.index(min(seconds))
        self._tell(
            "deal",
            step=step,
            reason=f"rank {slow} is {seconds[slow] / seconds[fast]:.1f}x slower than rank {fast}: micro-batches "
            f"{_dealt(better)} instead of {_dealt(self.dealt)}, step {now:.2g} s -> {then:.2g} s expected",
        )
        self.dealt = better


def pace_of(steps: Sequence[Sequence[Any]]) -> Pace:
    """From the marks of some steps: the beginning of every micro-batch, and of the exchange in the last one."""
    wholes = [_seconds(marks[0], marks[-2]) / (len(marks) - 2) for marks in steps if len(marks) > 2]
    return Pace(median(wholes) if wholes else None, median(_seconds(*marks[-2:]) for marks in steps))


def seconds_each(paces: Sequence[Pace]) -> list[float]:
    """Of one micro-batch, by rank. Whoever runs one in a step has measured its forward only: the others know by how
    much the whole is longer."""
    ratios = [pace.whole / max(pace.forward, 1e-9) for pace in paces if pace.whole is not None]
    usual = median(ratios) if ratios else 1.0
    return [max(1e-9, pace.forward * usual if pace.whole is None else pace.whole) for pace in paces]


def longest(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """What the last rank takes for its micro-batches."""
    return max(n * s for n, s in zip(counts, seconds, strict=True))


def _dealt(counts: Sequence[int], most: int = 16) -> str:
    return " + ".join(map(str, counts[:most])) + " + ..." * (len(counts) > most)


def _now(device: torch.device) -> Any:
    """A moment of the device's own time: a GPU's host runs ahead of it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return end - begin
    end.synchronize()  # the host waits for the device: once in a measurement
    return begin.elapsed_time(end) / 1000
