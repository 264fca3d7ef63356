"""How an epoch is cut: windows (one optimizer step each) -> micro-batches -> ranks. Pure arithmetic.

Windows and micro-batches do not depend on the number of ranks; ranks own contiguous ranges of micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass


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


def deal(count: int, rank: int, size: int) -> range:
    """The contiguous part of `count` items that belongs to `rank`; parts differ by at most one."""
    return range(count * rank // size, count * (rank + 1) // size)
