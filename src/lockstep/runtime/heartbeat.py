"""A rank's sign of life: its step and phase in a few bytes of shared memory, which its launcher can read at any
moment, also while the rank hangs in a collective, is stopped, or has just died. No torch here.

One `beat` costs about a microsecond and asks nobody: it is a store into a mapped file.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = "LOCKSTEP_FOLDER"  # where a rank and its launcher meet: pulses, failure records, stacks, settings

PHASES = (
    "start",  # importing, reading the configuration
    "join",  # meeting the other ranks
    "build",  # making the model, the data and the optimizers
    "load",  # reading a checkpoint
    "compile",  # the model, before the first exchange
    "data",  # waiting for the next micro-batch
    "compute",  # forward, and backward of all micro-batches but the last
    "exchange",  # the last backward, in which the gradients travel
    "update",  # the optimizer
    "agree",  # a small collective outside the step; `place` says which
    "evaluate",
    "snapshot",  # copying the state for a checkpoint: training waits
    "commit",  # waiting for a checkpoint to be on disk
    "yours",  # code of the user's: an own loop between two steps, after_step, show
    "end",  # report and summary
)
_NUMBER = {phase: number for number, phase in enumerate(PHASES)}
_HEAD = struct.Struct("<QdqqB")  # beats, time of the last one, step, steps ended by this process, phase
_PLACE = struct.Struct("<64s")
_LONGEST = struct.Struct(f"<{len(PHASES)}d")  # the longest stay in each phase so far, the first of each left out
SIZE = _HEAD.size + _PLACE.size + _LONGEST.size


@dataclass(frozen=True)
class View:
    """What a launcher reads of one rank."""

    beats: int
    age: float  # seconds since the last beat
    step: int
    steps: int  # ended by this process: 0 while the first one compiles
    phase: str
    place: str
    longest: dict[str, float] = field(default_factory=dict)


class Heartbeat:
    """The rank's side. `spent` adds up the seconds of every phase, for whoever looks for a slow rank."""

    def __init__(self, path: Path | None = None):
        if path is None:
            self._memory = bytearray(SIZE)
        else:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.ftruncate(file, SIZE)
            self._memory = mmap.mmap(file, SIZE)
            os.close(file)
        self.step, self.phase, self.beats = 0, "start", 0
        self.spent = dict.fromkeys(PHASES, 0.0)
        self.hook: Callable[[int, str], None] | None = None  # fault injection
        self._longest = dict.fromkeys(PHASES, 0.0)
        self._visits = dict.fromkeys(PHASES, 0)
        self._steps = 0
        self._since = time.monotonic()
        self._write(self._since)

    @staticmethod
    def from_env(rank: int) -> Heartbeat:
        folder = os.environ.get(FOLDER)
        return Heartbeat(Path(folder) / f"heartbeat-{rank}" if folder else None)

    def beat(self, phase: str, step: int | None = None) -> None:
        """This rank enters `phase`."""
        now = time.monotonic()
        self._leave(now)
        self.phase = phase
        if step is not None and step != self.step:
            self.step, self._steps = step, self._steps + 1
        self._write(now)
        if self.hook is not None:
            self.hook(self.step, phase)

    def place(self, text: str) -> None:
        """More about where: the name of a collective, say."""
        _PLACE.pack_into(self._memory, _HEAD.size, text.encode()[: _PLACE.size])

    def _leave(self, now: float) -> None:
        stayed, phase = now - self._since, self.phase
        self.spent[phase] += stayed
        self._since = now
        self._visits[phase] += 1
        if stayed > self._longest[phase] and self._visits[phase] > 2:  # the first ones compile, allocate, connect
            self._longest[phase] = stayed
            _LONGEST.pack_into(self._memory, _HEAD.size + _PLACE.size, *self._longest.values())

    def _write(self, now: float) -> None:
        self.beats += 1
        _HEAD.pack_into(self._memory, 0, self.beats, now, self.step, self._steps, _NUMBER[self.phase])


def read(path: Path) -> View | None:
    """The launcher's side; None while the rank has not begun to beat."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < SIZE:
        return None
    beats, moment, step, steps, phase = _HEAD.unpack_from(data, 0)
    if not beats or phase >= len(PHASES):
        return None
    (place,) = _PLACE.unpack_from(data, _HEAD.size)
    longest = _LONGEST.unpack_from(data, _HEAD.size + _PLACE.size)
    return View(
        beats=beats,
        age=max(0.0, time.monotonic() - moment),
        step=step,
        steps=steps,
        phase=PHASES[phase],
        place=place.rstrip(b"\0").decode(errors="replace"),
        longest=dict(zip(PHASES, longest, strict=True)),
    )
