"""Failure records: the first process to fail says so in plain JSON, so that its error is shown first and whole."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.errors import UserError


@dataclass(frozen=True)
class Failure:
    rank: int
    host: str
    time: float
    kind: str  # the exception's type, or the signal's name
    message: str
    traceback: str = ""
    for_user: bool = False  # the message says what to do: no traceback needed

    @property
    def exit_code(self) -> int:
        return 2 if self.for_user else 1

    def text(self, log: Path | None = None) -> str:
        if self.for_user:
            return f"lockstep: {self.message}"
        when = time.strftime("%H:%M:%S", time.localtime(self.time))
        head = f"lockstep: rank {self.rank} on {self.host} failed first, at {when}: {self.kind}: {self.message}"
        return "\n".join([head, self.traceback.rstrip(), f"its log: {log}" if log else ""]).strip()


def record(folder: Path, rank: int, error: BaseException) -> None:
    """Called in the failing process, whatever state it is in."""
    failure = Failure(
        rank=rank,
        host=socket.gethostname(),
        time=time.time(),
        kind=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        for_user=isinstance(error, UserError),
    )
    staged = folder / f"rank-{rank}.json.tmp"
    staged.write_text(json.dumps(asdict(failure)))
    os.replace(staged, folder / f"rank-{rank}.json")  # a reader never sees half a record


@dataclass(frozen=True)
class Exit:
    code: int
    seen: float  # when the launcher noticed


def first(folder: Path, ended: dict[int, Exit]) -> Failure | None:
    """The culprit among the ranks that ended by themselves: one killed from outside, or else whoever failed earliest.

    A killed process leaves no record, and the others notice within milliseconds that it is gone. Only an abort may be
    such a consequence itself: it counts from the time it was seen.
    """
    for rank, end in sorted(ended.items()):
        if end.code < 0 and end.code != -signal.SIGABRT:
            return _unrecorded(rank, end)
    found = [Failure(**json.loads(path.read_text())) for path in folder.glob("rank-*.json")]
    recorded = {failure.rank for failure in found}
    found += [_unrecorded(rank, end) for rank, end in ended.items() if end.code and rank not in recorded]
    return min(found, key=lambda failure: failure.time, default=None)


def _unrecorded(rank: int, end: Exit) -> Failure:
    if end.code > 0:
        return Failure(rank, socket.gethostname(), end.seen, "exit", f"ended with code {end.code}")
    name = signal.Signals(-end.code).name
    hint = " (often: out of host memory)" if name == "SIGKILL" else ""
    return Failure(rank, socket.gethostname(), end.seen, name, f"killed by signal {-end.code}{hint}")
