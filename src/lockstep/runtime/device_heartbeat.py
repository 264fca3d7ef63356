"""A heartbeat that knows how long the device took.

On a GPU the host only hands out work and runs ahead: its clock says nothing about how long a phase took there. Events
in the stream do. They are read when they have happened anyway, a few steps later: nothing waits for the device.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from lockstep.runtime.heartbeat import FOLDER, Heartbeat

# Phases of every step. `data` is then the time for which the device had nothing to do because its batch was late;
# what a host that runs ahead waits for does not count.
TIMED = frozenset({"data", "compute", "exchange", "update", "agree", "yours"})
MOST = 512  # stays not yet read: a device that is so far behind hangs


class Event(Protocol):
    """What is needed of a torch.cuda.Event."""

    def record(self) -> object: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any, /) -> float: ...


class DeviceHeartbeat(Heartbeat):
    """`spent` of the phases in TIMED in seconds of the device. `longest` stays with the host, as does `age`."""

    def __init__(self, path: Path | None = None, event: Callable[[], Event] | None = None):
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))
        self._free: list[Event] = []
        self._entered: Event | None = None  # when the device began the present phase; None: it is not timed
        self._unread: deque[tuple[str, Event, Event]] = deque()  # phase, its begin, its end
        super().__init__(path)

    @staticmethod
    def from_env(rank: int) -> DeviceHeartbeat:
        folder = os.environ.get(FOLDER)
        return DeviceHeartbeat(Path(folder) / f"heartbeat-{rank}" if folder else None)

    def beat(self, phase: str, step: int | None = None) -> None:
        self._read()
        begin, leaving = self._entered, self.phase
        self._entered = None
        if (begin or phase in TIMED) and len(self._unread) < MOST:
            now = self._free.pop() if self._free else self._event()
            now.record()
            if begin:
                self._unread.append((leaving, begin, now))
            self._entered = now if phase in TIMED else None
        super().beat(phase, step)

    def _leave(self, now: float) -> None:
        on_device = self.spent[self.phase]
        super()._leave(now)
        if self.phase in TIMED:
            self.spent[self.phase] = on_device

    def _read(self) -> None:
        """Add up what the device has finished, and use those events again."""
        while self._unread and self._unread[0][2].query():
            phase, begin, end = self._unread.popleft()
            self.spent[phase] += begin.elapsed_time(end) / 1000
            self._free.append(begin)
            still_used = end is self._entered or (self._unread and end is self._unread[0][1])
            if not still_used:
                self._free.append(end)
