"""How an epoch is cut: windows (one optimizer step each) -> micro-batches -> ranks. Pure arithmetic.

Windows and micro-batches do not depend on the number of ranks; ranks own contiguous ranges of micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace


@dataclass(frozen=True, slots=True)
class Window:
    """The samples of one global step: positions [start, stop) in the order of `epoch`."""

    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def next_window(position: int, length: int, batch: int, tail: str) -> Window:
    """The window at `position`, the number of samples consumed since the start of the run.

    A window never crosses an epoch: the last one is short (`tail="short"`) or left out (`"drop"`).
    """
    epoch, start = divmod(position, length)
    if tail == "drop" and start + batch > length:
        epoch, start = epoch + 1, 0
    return Window(epoch, start, min(start + batch, length))


def micro_slice(window: Window, micro: int, index: int) -> tuple[int, int]:
    start = window.start + index * micro
    return start, min(start + micro, window.stop)


def deal(count: int, rank: int, size: int, weights: Sequence[float] | None = None) -> range:
    """The contiguous part of `count` items that belongs to `rank`. Without `weights` parts differ by at most one."""
    if weights is None:
        return range(count * rank // size, count * (rank + 1) // size)
    counts = apportion(count, tuple(weights))
    start = sum(counts[:rank])
    return range(start, start + counts[rank])


@lru_cache(maxsize=64)
def apportion(count: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    """How many of `count` equal items each rank gets, so that ranks of these speeds are done as early as possible.

    One after another goes to whoever would be done with it first; of equals, to the first. Nobody is left without if
    there are enough: an idle rank runs an item all the same, as padding.
    """
    counts = [int(count >= len(weights))] * len(weights)
    waiting = [((n + 1) / weight, rank) for rank, (n, weight) in enumerate(zip(counts, weights, strict=True))]
    heapify(waiting)
    for _ in range(count - sum(counts)):
        rank = waiting[0][1]
        counts[rank] += 1
        heapreplace(waiting, ((counts[rank] + 1) / weights[rank], rank))
    return tuple(counts)
