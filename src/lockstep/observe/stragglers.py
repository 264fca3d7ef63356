"""Finds the rank that the others wait for, and why they do, and whether all of them wait for data.

The answer comes from four figures per rank, which are reduced together with the metrics.

All ranks end a step together, so a step takes the same time on each: a rank that works longer waits less. A slow rank
shows twice: its own work takes longer, and its wait in the all-reduce is shorter by the same amount. Slow communication
costs all ranks the same time, wherever the bad cable is, so these figures cannot attribute it to a rank.
A rank with more micro-batches is compared with the time that the others would need for the same number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from lockstep.runtime.heartbeat import PHASES

# Each adds up the phases of a heartbeat that name it.
COLUMNS = ("data", "compute", "all-reduce")
WIDTH = len(COLUMNS) + 1  # figures of a rank: the last one is its number of micro-batches

MIN_SHARE = 0.1  # share of a step that must be lost before a slow rank is reported

# Late data is reported if GPUs wait for their batch for this share of a step, in this many intervals in a row.
DATA_WAIT_SHARE = 0.2
CONSECUTIVE = 2

# On a shared machine different ranks are slow at different times. A slow rank is reported only if it is the same one
# for this many intervals in a row and this many seconds. Then nothing is reported for PAUSE_S.
LASTING = 5
LASTING_S = 10.0
PAUSE_S = 300.0


@dataclass(frozen=True)
class SlowRank:
    """A rank that the others wait for."""

    rank: int
    work: str  # what takes long: "data" or "compute"
    seconds: float  # per step, that this rank spends on it
    others: float  # the same for the others: their median, scaled to this rank's number of micro-batches
    share: float  # fraction of a step that every rank loses by waiting

    def __str__(self) -> str:
        what = {"data": "waits for data", "compute": "computes"}[self.work]
        return (
            f"rank {self.rank} is slow: it {what} {self.seconds:.3g} s a step, the others {self.others:.3g} s; "
            f"all ranks lose {self.share:.0%} of their time by waiting for it"
        )


def pack(before: Mapping[str, float], now: Mapping[str, float], steps: int, micro_batches: int) -> list[float]:
    """Return one rank's figures per step: seconds in the order of COLUMNS, then micro-batches.

    `before` and `now` are two readings of `Heartbeat.spent`.
    """
    spent = [
        sum(now[name] - before[name] for name, phase in PHASES.items() if phase.column == column) for column in COLUMNS
    ]
    return [figure / max(1, steps) for figure in (*spent, micro_batches)]


def unpack(values: Sequence[float]) -> list[dict[str, float]]:
    """Return one row per rank from the concatenated figures of all ranks."""
    return [
        dict(zip((*COLUMNS, "micro_batches"), values[i : i + WIDTH], strict=True)) for i in range(0, len(values), WIDTH)
    ]


def slowest(rows: Sequence[Mapping[str, float]], threshold: float = 1.3) -> SlowRank | None:
    """Return the rank whose own work takes `threshold` times as long as the others' if they wait for it."""
    if len(rows) < 2:
        return None

    rank = max(range(len(rows)), key=lambda rank: _work_s(rows[rank]) / _micro_batches(rows[rank]))
    slow = rows[rank]
    others = [row for index, row in enumerate(rows) if index != rank]

    # Its work must take longer, and the others must wait for about as long.
    work_s = _work_s(slow)
    usual = median(_work_s(row) * _scale(slow, row) for row in others)

    excess = work_s - usual
    waits = median(row["all-reduce"] for row in others) - slow["all-reduce"]

    share = min(excess, waits) / max(work_s + slow["all-reduce"], 1e-9)

    # A slow rank is much slower than usual, the others wait for it, and that costs a share of the step.
    if work_s < threshold * usual or waits < excess / 2 or share < MIN_SHARE:
        return None

    # Blame data or compute, whichever exceeds the others' time by more.
    usual_of = {work: median(row[work] * _scale(slow, row) for row in others) for work in ("data", "compute")}
    longest = max(usual_of, key=lambda work: slow[work] - usual_of[work])
    return SlowRank(rank, longest, slow[longest], usual_of[longest], share)


def _work_s(row: Mapping[str, float]) -> float:
    """Return the seconds per step in which a rank works, and does not wait for others."""
    return row["data"] + row["compute"]


def _micro_batches(row: Mapping[str, float]) -> float:
    return row["micro_batches"] or 1.0


def _scale(slow: Mapping[str, float], row: Mapping[str, float]) -> float:
    # From a rank's time to the time that it would need for as many micro-batches as the slow rank has.
    return _micro_batches(slow) / _micro_batches(row)


class SlowRankWatch:
    """Reports a rank that has been slow for a while, once, then stays silent for some minutes."""

    def __init__(self, threshold: float = 1.3, clock: Callable[[], float] = time.monotonic):
        self.threshold = threshold
        self._clock = clock
        # The slow rank (None: none is slow), for how many intervals in a row, and since when.
        self._rank: int | None = None
        self._intervals = 0
        self._since = 0.0

        self._reported: tuple[int, str] | None = None  # the rank and the work of the last report
        self._silent_until = -float("inf")

    def look(self, rows: Sequence[Mapping[str, float]]) -> SlowRank | None:
        """Take the figures of an interval and return a slow rank if it should be reported now."""
        now = self._clock()
        slow = slowest(rows, self.threshold)
        rank = slow.rank if slow else None

        # Another rank, or none: the count of intervals begins again.
        if rank != self._rank:
            self._rank = rank
            self._intervals = 0
            self._since = now

        self._intervals += 1

        if slow is None:
            self._reported = None
            return None

        # A rank that stays slow in the same way is reported once.
        lasts = self._intervals >= LASTING and now - self._since >= LASTING_S
        if not lasts or now < self._silent_until or (slow.rank, slow.work) == self._reported:
            return None

        self._reported = (slow.rank, slow.work)
        self._silent_until = now + PAUSE_S
        return slow


class LateDataWatch:
    """Reports once that all GPUs wait for data. (A single GPU that waits makes its rank a slow rank.)"""

    _intervals = 0  # in a row, in which they waited
    _reported = False

    def look(self, rows: Sequence[Mapping[str, float]]) -> str | None:
        """Take the figures of an interval and return a warning if it is due."""
        least = min(rows, key=_share_of_data)
        share = _share_of_data(least)
        self._intervals = self._intervals + 1 if share >= DATA_WAIT_SHARE else 0
        if self._reported or self._intervals < CONSECUTIVE:
            return None

        # Once: the advice stays the same.
        self._reported = True
        return (
            f"the GPU has nothing to do for {least['data'] * 1e3:.3g} ms of every step, {share:.0%} of it, "
            "because it waits for data: raise data.workers, for example to 4"
        )


def _share_of_data(row: Mapping[str, float]) -> float:
    return row["data"] / max(_work_s(row) + row["all-reduce"], 1e-9)
