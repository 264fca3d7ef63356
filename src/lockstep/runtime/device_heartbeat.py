"""A heartbeat that measures how long each phase took on the device.

On a GPU the host only enqueues work and runs ahead, so the host's clock does not show how long a phase took. CUDA
events in the stream do. They are read a few steps later, when they are complete, so that the host never waits for the
device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

from torch.cuda import Event

from lockstep.runtime.heartbeat import PHASES, Heartbeat

# The phases of every step. The time of `data` is how long the device was idle because its batch was late, and not how
# long the host, which runs ahead, waited for the batch.
TIMED = frozenset(name for name, phase in PHASES.items() if phase.column)

MAX_UNREAD = 512  # phases whose events are not read yet; if there are more, the device hangs


class DeviceHeartbeat(Heartbeat):
    """Measures `spent` of the phases in TIMED on the device; `longest` and `age` are measured by the host's clock."""

    def __init__(self, path: Path | None = None, event: Callable[[], Event] = lambda: Event(enable_timing=True)):
        self._event = event
        self._free: list[Event] = []  # for reuse
        self._entered: Event | None = None  # when the device began the current phase; None if that is not timed
        self._unread: deque[tuple[str, Event, Event]] = deque()  # phases that are not read yet: name, begin, end
        super().__init__(path)

    def beat(self, phase: str, step: int | None = None) -> None:
        self._read()
        begin = self._entered
        self._entered = None

        if (begin or phase in TIMED) and len(self._unread) < MAX_UNREAD:
            # One event is the end of a phase and the beginning of the next phase.
            now = self._free.pop() if self._free else self._event()
            now.record()
            if begin:
                self._unread.append((self.phase, begin, now))
            if phase in TIMED:
                self._entered = now

        left, on_device = self.phase, self.spent[self.phase]
        super().beat(phase, step)

        # `super` has added the host's time, which is not the device's.
        if left in TIMED:
            self.spent[left] = on_device

    def _read(self) -> None:
        """Add up the phases that the device has finished and free their events."""
        # Events complete in the order of the stream, so the first incomplete event ends the loop.
        while self._unread and self._unread[0][2].query():
            phase, begin, end = self._unread.popleft()
            self.spent[phase] += begin.elapsed_time(end) / 1000
            self._free.append(begin)

            # An event that also begins the next phase is freed when that phase has been read.
            begins_next = end is self._entered or (self._unread and end is self._unread[0][1])
            if not begins_next:
                self._free.append(end)
