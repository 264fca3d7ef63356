"""A rank's heartbeat: its step and phase in a few bytes of shared memory.

The launcher can read them at any moment, even while the rank hangs in a collective, is stopped, or has just died. One
`beat` takes about a microsecond and involves no other process: it is a store into a mapped file. This module does not
import torch.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lockstep.runtime import attempt_folder

# How long a visit of a phase takes. "steady": about as long in every step; "files": it reads or writes files;
# "unpredictable": earlier visits, if there were any, say nothing about the next visit.
Duration = Literal["steady", "files", "unpredictable"]


@dataclass(frozen=True)
class Phase:
    """The properties of a phase that the watchdog, the table of slow ranks and the GPU's clock use."""

    duration: Duration = "unpredictable"
    waits: bool = False  # the rank waits for other ranks in this phase, so it is not blamed for a hang
    saves: bool = False  # the phase saves what was trained, and must not be cut short
    before_all_reduce: bool = False  # other ranks may wait in the all-reduce until this phase ends
    work_done: bool = False  # the rank has trained all its steps: it needs no other rank any more
    after_run: bool = False  # the run is closed: how long the program goes on is not judged
    column: str = ""  # the column in the table of slow ranks, for a phase that is part of a step; a GPU times it


PHASES = {
    "start": Phase(),  # importing, reading the configuration
    "join": Phase(waits=True),  # joining the process group
    "build": Phase(),  # making the model, the data and the optimizers
    "load": Phase(),  # reading a checkpoint
    "compile": Phase(),  # the model, before the first gradient all-reduce
    "data": Phase("files", before_all_reduce=True, column="data"),  # waiting for the next micro-batch
    "compute": Phase("steady", before_all_reduce=True, column="compute"),  # forward, and each backward but the last
    "all-reduce": Phase("steady", waits=True, column="all-reduce"),  # the last backward, with the gradient all-reduce
    "update": Phase("steady", column="compute"),  # the optimizer
    "collective": Phase("steady", waits=True, column="all-reduce"),  # outside the step; the detail names it
    "evaluate": Phase("files"),
    "snapshot": Phase("files", saves=True),  # copying the state for a checkpoint: training waits
    "commit": Phase("files", saves=True),  # waiting for a checkpoint to be on disk
    "user code": Phase(column="compute"),  # a user's loop between two steps, after_step, show
    "end": Phase(saves=True, work_done=True),  # report and summary
    "after run": Phase(work_done=True, after_run=True),  # what the program does when the run is closed: an export, say
}
_NUMBER = {phase: number for number, phase in enumerate(PHASES)}

# The layout of the file. First: number of beats, time of the last beat, step, steps ended by this process, phase.
_HEAD = struct.Struct("<QdqqB")

# Then the detail, as text, and the longest time spent in each phase, ignoring its first two visits.
_DETAIL = struct.Struct("<64s")
_LONGEST = struct.Struct(f"<{len(PHASES)}d")
SIZE = _HEAD.size + _DETAIL.size + _LONGEST.size


@dataclass(frozen=True, kw_only=True)
class HeartbeatView:
    """The heartbeat of one rank, as a launcher reads it."""

    beats: int
    age: float  # seconds since the last beat
    step: int
    steps_here: int  # steps that this process has ended: 0 while the first step compiles
    phase: str
    detail: str
    longest: dict[str, float] = field(default_factory=dict)  # phase -> the longest stay, in seconds


class Heartbeat:
    """Writes the heartbeat, on the rank's side. `spent` adds up the seconds of every phase, which shows slow ranks.

    `beat` marks the beginning of a phase; `visit` is a phase inside another one. The launcher's watchdog compares the
    time in a phase with the longest stay in it so far.
    """

    def __init__(self, path: Path | None = None):
        self._memory: mmap.mmap | bytearray = bytearray(SIZE)
        if path is not None:
            # A mapped file outlives the process: the launcher can read it after a crash.
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.ftruncate(file, SIZE)
            self._memory = mmap.mmap(file, SIZE)
            os.close(file)

        self.step = 0
        self.phase = "start"
        self.beats = 0
        self.spent = dict.fromkeys(PHASES, 0.0)
        self.hook: Callable[[int, str], None] | None = None  # called with step and phase at every beat: fault injection

        self._longest = dict.fromkeys(PHASES, 0.0)  # seconds of the longest stay in each phase
        self._visits = dict.fromkeys(PHASES, 0)  # how many times each phase has ended
        self._steps = 0  # steps that this process has ended
        self._in_steps = False  # whether it has entered a step
        self._since = time.monotonic()  # when the current phase began
        self.beat("start")

    @classmethod
    def from_env(cls, rank: int) -> Heartbeat:
        """Return a heartbeat that the launcher reads, if there is a launcher."""
        folder = attempt_folder.current()
        return cls(attempt_folder.heartbeat(folder, rank) if folder else None)

    def beat(self, phase: str, step: int | None = None) -> None:
        """Enter `phase`, and a new step if `step` changed."""
        # Several times in every micro-batch, hence without calls of other methods.
        now = time.monotonic()
        left, stayed = self.phase, now - self._since
        self.spent[left] += stayed
        self._visits[left] += 1
        if stayed > self._longest[left]:
            self._note_longest(left, stayed)

        self.phase = phase
        self._since = now
        self.beats += 1
        if step is not None:
            # The first step that a resumed run enters has a new number, but no step has ended.
            if step != self.step and self._in_steps:
                self._steps += 1

            self.step = step
            self._in_steps = True

        _HEAD.pack_into(self._memory, 0, self.beats, now, self.step, self._steps, _NUMBER[phase])

        # Last, so that a fault that ends the process finds the new phase in the file.
        if self.hook is not None:
            self.hook(self.step, phase)

    def keep_alive(self) -> None:
        """Enter the current phase again: it is long, and it advances."""
        self.beat(self.phase)

    @contextmanager
    def visit(self, phase: str, step: int | None = None) -> Iterator[None]:
        """Enter `phase` for the duration of a block, and then return to the phase before it."""
        # There is no `finally`: after an error the heartbeat still shows the launcher in which phase this rank failed.
        before = self.phase
        self.beat(phase, step)
        yield
        self.beat(before)

    def set_detail(self, text: str) -> None:
        """Set the detail of the phase: the name of a collective, for example."""
        _DETAIL.pack_into(self._memory, _HEAD.size, text.encode()[: _DETAIL.size])

    def _note_longest(self, phase: str, stayed: float) -> None:
        """Note the longest stay in a phase so far, for the watchdog."""
        # The first two visits compile, allocate and connect: they say nothing about later visits.
        if self._visits[phase] > 2:
            self._longest[phase] = stayed
            _LONGEST.pack_into(self._memory, _HEAD.size + _DETAIL.size, *self._longest.values())


def waits_in_step(step: int, ranks: int) -> bool:
    """Return whether some rank of this machine waits for the others in the all-reduce of this step.

    A rank that will not take part in it calls it. Without a launcher there are no heartbeat files, and the
    answer is False.
    """
    folder = attempt_folder.current()
    views = [read(attempt_folder.heartbeat(folder, rank)) for rank in range(ranks)] if folder else []
    return any(view is not None and view.phase == "all-reduce" and view.step == step for view in views)


def read(path: Path) -> HeartbeatView | None:
    """Read a rank's heartbeat, on the launcher's side. Return None before the first beat."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None

    # The file exists a moment before it has its size.
    if len(data) < SIZE:
        return None

    beats, moment, step, steps_here, phase = _HEAD.unpack_from(data, 0)
    if not beats or phase >= len(PHASES):
        return None

    (detail,) = _DETAIL.unpack_from(data, _HEAD.size)

    return HeartbeatView(
        beats=beats,
        age=max(0.0, time.monotonic() - moment),
        step=step,
        steps_here=steps_here,
        phase=list(PHASES)[phase],
        detail=detail.rstrip(b"\0").decode(errors="replace"),
        longest=dict(zip(PHASES, _LONGEST.unpack_from(data, _HEAD.size + _DETAIL.size), strict=True)),
    )
