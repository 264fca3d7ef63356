"""Divides an epoch into windows (one per optimizer step), and a window into micro-batches for the ranks.

Windows and micro-batches do not depend on the number of ranks. Each rank gets a contiguous range of micro-batches.
A *position* counts the samples of all epochs in order; an *offset* counts those of one epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from typing import NamedTuple


class Window(NamedTuple):
    """The samples of one global step: offsets [start, stop) in the order of `epoch`."""

    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def next_window(position: int, length: int, batch: int, tail: str) -> Window:
    """Return the first window at or after `position`, which counts the samples of all epochs in order.

    A window never crosses the end of an epoch: the last window is short (`tail="short"`) or dropped (`tail="drop"`).
    Dropped samples keep their positions.
    """
    epoch, start = divmod(position, length)
    if tail == "drop" and start + batch > length:
        epoch, start = epoch + 1, 0

    return Window(epoch, start, min(start + batch, length))


def steps_before(position: int, length: int, batch: int, tail: str) -> int:
    """Return how many windows of size `batch` lead to `position`.

    After a resume with another batch size the position may lie within a window of the new size. Such a window counts,
    if the rest of its epoch has one window less.
    """
    epoch, start = divmod(position, length)
    whole = length if tail == "drop" else length + batch - 1
    return epoch * (whole // batch) + whole // batch - (whole - start) // batch


def micro_slice(window: Window, micro_batch_size: int, index: int) -> tuple[int, int]:
    """Return the offsets [start, stop) of one micro-batch of a window. The last micro-batch may be short."""
    start = window.start + index * micro_batch_size
    return start, min(start + micro_batch_size, window.stop)


def rank_range(count: int, rank: int, size: int, speeds: Sequence[float] | None = None) -> range:
    """Divide `count` items among the ranks and return the contiguous range for `rank`.

    Without `speeds` the ranges differ in length by at most one.
    """
    if speeds is None:
        return range(count * rank // size, count * (rank + 1) // size)

    # Every rank computes the counts of all ranks, so no communication is needed.
    counts = rank_counts(count, tuple(speeds))
    start = sum(counts[:rank])
    return range(start, start + counts[rank])


@lru_cache(maxsize=64)
def rank_counts(count: int, speeds: tuple[float, ...]) -> tuple[int, ...]:
    """Return how many of `count` equal items each rank gets, so that the slowest rank finishes as early as possible.

    Items are assigned one after another, each to the rank that would finish it first; ties go to the lowest rank.
    Every rank gets at least one item if there are enough: without one, it would have to run padding anyway.
    """
    minimum = int(count >= len(speeds))
    counts = [minimum] * len(speeds)

    # A heap of (time at which the rank would finish its next item, rank).
    finishing = [((minimum + 1) / speed, rank) for rank, speed in enumerate(speeds)]
    heapify(finishing)
    for _ in range(count - sum(counts)):
        rank = finishing[0][1]
        counts[rank] += 1
        heapreplace(finishing, ((counts[rank] + 1) / speeds[rank], rank))

    return tuple(counts)
