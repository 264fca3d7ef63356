"""Inject faults, for tests: `lockstep.testing.fail_at` describes them, the ranks carry them out. No torch here.

The description travels in an environment variable, since the ranks are other processes. Files count how often a fault
happened, since a process that is killed cannot.
"""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from lockstep.errors import UserError

VARIABLE = "LOCKSTEP_FAULTS"

# In addition to the phases of a heartbeat, a fault may happen at these points.
PLACES = (
    "loss",  # a loss was computed
    "write",  # a checkpoint's file is half written
    "rename",  # a checkpoint is complete but not yet renamed
    "latest",  # a checkpoint is renamed, but `latest` does not name it yet
    "committed",  # everything about a checkpoint is done
)

# Faults that happen only at one point, and that point.
ONLY_AT = {"inf": "loss", "nan": "loss", "disk full": "write", "corrupt": "committed", "truncate": "committed"}


@dataclass
class Fault:
    """A fault and the moment at which it happens. `None` for rank, step or phase means any.

    Tests and users inject faults through LOCKSTEP_FAULTS. A fault happens at a beat of the heartbeat, so its rank, step
    and phase say exactly when.
    """

    how: str
    rank: int | None = None
    step: int | None = None
    phase: str | None = None

    # Counted over all ranks and restarts; None: every time.
    times: int | None = 1
    seconds: float | None = None  # for "slow"

    # The folder that counts how often it happened; None: each process counts for itself.
    marks: str | None = None
    _untried: Iterator[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.how not in HOW:
            raise UserError(
                f"how={self.how!r} is not a fault", f"faults are {', '.join(HOW)}", f"use one of: {', '.join(HOW)}"
            )

        if (self.how == "slow") != (self.seconds is not None):
            raise UserError(
                f"a fault with how={self.how!r} cannot have seconds={self.seconds}",
                'seconds are for how="slow", which needs them',
                'give seconds=0.5 to how="slow", and to no other',
            )

        only_phase = ONLY_AT.get(self.how)
        if only_phase and self.phase not in (None, only_phase):
            raise UserError(
                f"the fault how={self.how!r} can only happen in phase={only_phase!r}",
                f"phase={self.phase!r}",
                f"leave phase out, or use phase={only_phase!r}",
            )

        if self.times is not None and self.times < 1:
            raise UserError(
                f"times={self.times} of the fault how={self.how!r} is less than 1",
                "",
                "use a count from 1, or times=None for every time",
            )

        self._untried = iter(range(self.times or 0))

    def due(self, phase: str, step: int, rank: int) -> bool:
        """Return whether the fault happens now and count it if so."""
        # A fault in ONLY_AT has its own phase, even if none was given.
        wanted_phase = ONLY_AT.get(self.how, self.phase)
        if wanted_phase not in (None, phase) or self.rank not in (None, rank) or self.step not in (None, step):
            return False

        # All ranks compete for the `times`: the rank that creates the file has the fault.
        claims = (self.marks is None or _created(Path(self.marks) / f"fired-{n}") for n in self._untried)

        return self.times is None or any(claims)


def _created(path: Path) -> bool:
    """Create the file and return True, or return False if another process has created it."""
    # Exclusive creation is atomic between processes, even across restarts.
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False

    return True


def check_phases(faults: Collection[Fault], phases: Collection[str]) -> None:
    """Refuse a phase that never comes: the fault would never happen, and its test would prove nothing."""
    known = [*phases, *PLACES]
    for fault in faults:
        if fault.phase is not None and fault.phase not in known:
            raise UserError(
                f"phase={fault.phase!r} of a fault does not exist",
                f"a fault with how={fault.how!r}",
                f"use one of: {', '.join(known)}",
            )


def to_text(faults: Collection[Fault]) -> str:
    """Return the environment variable's value: a JSON list of objects with the fields of `Fault`."""
    names = [spec.name for spec in fields(Fault) if spec.init]
    return json.dumps([{name: getattr(fault, name) for name in names} for fault in faults])


def from_text(text: str) -> list[Fault]:
    try:
        return [Fault(**values) for values in json.loads(text)]
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{VARIABLE}={text} is not a list of faults",
            str(error),
            f"""write a list like {VARIABLE}='[{{"how": "kill", "rank": 1, "step": 5}}]'""",
        ) from None


@cache
def planned() -> list[Fault]:
    """Return the faults of the environment, which is read once."""
    return from_text(os.environ.get(VARIABLE) or "[]")


def reset() -> None:
    """Read the environment again at the next `fire`."""
    planned.cache_clear()


def fire(phase: str, step: int) -> str | None:
    """Carry out the faults that are due in this phase of this step.

    One that only the caller can carry out (it is not in `ACTS`) is returned; it is always one of this `phase`.
    """
    rank = int(os.environ.get("RANK", "0"))
    returned = None
    for fault in planned():
        if fault.due(phase, step, rank):
            if fault.how in ACTS:
                ACTS[fault.how](fault)
            else:
                returned = fault.how

    return returned


class Files(Protocol):
    """The methods of a checkpoint storage that `damage_committed` needs."""

    def open(self, key: str) -> io.BufferedIOBase: ...

    def write(self, key: str, chunks: Iterable[memoryview]) -> None: ...


def damage_committed(files: Files, key: str, step: int) -> None:
    """Carry out the faults of the point "committed". Some of them damage the file `key` as a bad disk would."""
    how = fire("committed", step)
    if not how:
        return

    with files.open(key) as stream:
        data = bytearray(stream.read())

    middle = len(data) // 2
    if how == "truncate":
        del data[middle:]
    else:
        data[middle] ^= 0x10

    files.write(key, [memoryview(data)])


def install(heartbeat: Any) -> None:
    """Have every beat of this rank carry out the faults that are due. Without faults nothing is installed."""
    # A misspelt phase must not go unnoticed.
    faults = planned()
    check_phases(faults, heartbeat.spent)
    if faults:
        heartbeat.hook = lambda step, phase: fire(phase, step)


def _signal(number: int) -> Callable[[Fault], None]:
    return lambda fault: os.kill(os.getpid(), number)


# The stack of a failing rank ends in one of these functions, so each has a name.


def _raise(fault: Fault) -> None:
    raise RuntimeError("injected")


def _fill_disk(fault: Fault) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _hang(fault: Fault) -> None:
    while True:
        time.sleep(3600)


def _slow(fault: Fault) -> None:
    time.sleep(fault.seconds or 0.0)


def _exit(fault: Fault) -> None:
    os._exit(3)


def _vanish(fault: Fault) -> None:
    os._exit(0)


def _abort(fault: Fault) -> None:
    os.abort()


def _segfault(fault: Fault) -> None:
    ctypes.string_at(0)


# What a rank does that has one of these faults. The caller of `fire` carries out the others.
ACTS: dict[str, Callable[[Fault], None]] = {
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    "term": _signal(signal.SIGTERM),
    "raise": _raise,
    "hang": _hang,
    "slow": _slow,
    "exit": _exit,
    "segfault": _segfault,
    "abort": _abort,
    "vanish": _vanish,
    "disk full": _fill_disk,
}
HOW = tuple(dict.fromkeys([*ACTS, *ONLY_AT]))
