"""Which rank do the others wait for, and why? And do all of them wait for data? From four figures of every rank, which
travel with the metrics.

All ranks leave a step together, so that a step is as long on each of them: whoever works longer, waits less. A slow
rank shows twice: its own work takes longer, and its wait in the exchange is shorter by as much. Slow communication
takes the same time from all ranks, whosever cable it is; these figures cannot name a rank for it, and none is named.
A rank that was given more micro-batches than others is compared with what they would take for as many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

# What counts as what, of the phases of a heartbeat.
COLUMNS = {"data": ("data",), "compute": ("compute", "update", "yours"), "exchange": ("exchange", "agree")}
WIDTH = len(COLUMNS) + 1  # figures of a rank: the last one is its micro-batches
LEAST_SHARE = 0.1  # of a step: less is not worth a word
MUCH = 0.2  # of a step, for which a GPU has nothing to do because its batch is late
CONSECUTIVE = 2  # intervals, before late data is told
# On a machine that others use too, now this rank is slow and now that one. It is news if it stays the same one.
LASTING = 5  # intervals in a row
LASTING_S = 10.0  # and seconds
SILENCE_S = 300.0  # after something was said


@dataclass(frozen=True)
class Slow:
    rank: int
    cause: str  # "data" or "compute"
    own: float  # seconds a step that this rank spends on the cause
    others: float  # the median of what the other ranks would, with as many micro-batches
    share: float  # of every rank's step that is lost by waiting

    def __str__(self) -> str:
        what = {"data": "waits for data", "compute": "computes"}[self.cause]
        return (
            f"rank {self.rank} is slow: it {what} {self.own:.3g} s a step, the others {self.others:.3g} s; "
            f"all ranks lose {self.share:.0%} of their time by waiting for it"
        )


def pack(before: Mapping[str, float], now: Mapping[str, float], steps: int, micro_batches: int) -> list[float]:
    """One rank's seconds per step between two readings of `Heartbeat.spent`, in the order of COLUMNS, and its
    micro-batches per step."""
    spent = [sum(now[phase] - before[phase] for phase in phases) for phases in COLUMNS.values()]
    return [figure / max(1, steps) for figure in (*spent, micro_batches)]


def unpack(values: Sequence[float]) -> list[dict[str, float]]:
    """The ranks' figures, one after another, as rows."""
    names = (*COLUMNS, "micro_batches")
    return [dict(zip(names, values[i : i + WIDTH], strict=True)) for i in range(0, len(values), WIDTH)]


def slowest(rows: Sequence[Mapping[str, float]], threshold: float = 1.3) -> Slow | None:
    """The rank whose own work takes `threshold` times as long as that of the others, if they do wait for it."""
    if len(rows) < 2:
        return None
    rank = max(range(len(rows)), key=lambda rank: _own(rows[rank]) / _micro_batches(rows[rank]))
    mine, others = rows[rank], [row for other, row in enumerate(rows) if other != rank]
    own, usual = _own(mine), median(_own(row) * _as_many(mine, row) for row in others)
    excess = own - usual
    waits = median(row["exchange"] for row in others) - mine["exchange"]
    lost = min(excess, waits)
    share = lost / max(own + mine["exchange"], 1e-9)
    if own < threshold * usual or waits < excess / 2 or share < LEAST_SHARE:
        return None
    theirs = {cause: median(row[cause] * _as_many(mine, row) for row in others) for cause in ("data", "compute")}
    cause = max(theirs, key=lambda cause: mine[cause] - theirs[cause])
    return Slow(rank, cause, mine[cause], theirs[cause], share)


def _own(row: Mapping[str, float]) -> float:
    return row["data"] + row["compute"]


def _micro_batches(row: Mapping[str, float]) -> float:
    return row["micro_batches"] or 1.0


def _as_many(mine: Mapping[str, float], row: Mapping[str, float]) -> float:
    """What a rank's time must be multiplied by, to be that of as many micro-batches as `mine`."""
    return _micro_batches(mine) / _micro_batches(row)


class Watch:
    """Names a rank that has been slow for a while, once; then says nothing for some minutes, whoever is slow."""

    def __init__(self, threshold: float = 1.3, clock: Callable[[], float] = time.monotonic):
        self.threshold, self._clock = threshold, clock
        self._rank: int | None = None
        self._intervals, self._since = 0, 0.0  # of that rank's slowness, without a gap
        self._silent_until, self._told = -float("inf"), (-1, "")  # the rank and the cause that were named last

    def look(self, rows: Sequence[Mapping[str, float]]) -> Slow | None:
        now, found = self._clock(), slowest(rows, self.threshold)
        rank = found.rank if found else None
        if found is None:
            self._told = (-1, "")
        if rank != self._rank:
            self._rank, self._intervals, self._since = rank, 0, now
        self._intervals += 1
        lasts = self._intervals >= LASTING and now - self._since >= LASTING_S
        if found is None or not lasts or now < self._silent_until or (found.rank, found.cause) == self._told:
            return None
        self._silent_until, self._told = now + SILENCE_S, (found.rank, found.cause)
        return found


class Hunger:
    """Says once that GPUs wait for data, all of them: where it is one, that one is slow."""

    def __init__(self) -> None:
        self._intervals = 0

    def look(self, rows: Sequence[Mapping[str, float]]) -> str | None:
        least = min(rows, key=_share_of_data)
        self._intervals = self._intervals + 1 if self._intervals >= CONSECUTIVE or _share_of_data(least) >= MUCH else 0
        if self._intervals != CONSECUTIVE:
            return None
        return (
            f"the GPU has nothing to do for {least['data'] * 1e3:.3g} ms of every step, {_share_of_data(least):.0%} of "
            "it, because its batch is late: let loader processes read it (data.workers=4), or more of them"
        )


def _share_of_data(row: Mapping[str, float]) -> float:
    return row["data"] / max(_own(row) + row["exchange"], 1e-9)
