"""Failures: the first process to fail says so in plain JSON, so that its error is shown first and whole."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.errors import Preempted, SmallerMicroBatch, UserError
from lockstep.launch import stacks
from lockstep.runtime import heartbeat

LEFT = Preempted.CODE  # the exit code of a rank that has saved and left because it was asked to
NODE, ZYGOTE, HANG, EXIT = "node", "zygote", "hang", "exit"  # kinds that are neither an exception nor a signal
SMALLER = SmallerMicroBatch.__name__  # the only exception that does not come again by itself
LOG_LINES = 10


@dataclass(frozen=True)
class Failure:
    rank: int
    host: str
    time: float
    kind: str  # the exception's type, the signal's name, or one of the kinds above
    message: str
    traceback: str = ""
    for_user: bool = False  # the message says what to do: no traceback needed
    step: int | None = None
    phase: str | None = None
    log: str = ""  # the last lines that the rank wrote

    @property
    def exit_code(self) -> int:
        return 2 if self.for_user else 1

    @property
    def from_python(self) -> bool:
        """An exception or an exit code: what the same program would most likely do again."""
        return self.kind not in (NODE, ZYGOTE, HANG, SMALLER) and not self.kind.startswith("SIG")

    @property
    def headline(self) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(self.time))
        if self.kind in (NODE, ZYGOTE):
            return f"lockstep: {self.message} ({when})"
        where = f"step {self.step}, phase {self.phase}, " if self.step is not None else ""
        return f"lockstep: rank {self.rank} on {self.host} failed at {where}{when}: {self.kind}: {self.message}"

    def text(self) -> str:
        """The culprit first, then what it left behind, indented."""
        if self.for_user:
            return f"lockstep: {self.message}"
        if self.kind == SMALLER:  # nothing is wrong with the program
            return self.headline
        detail = self.traceback.rstrip() or self.log.rstrip()
        return "\n".join([self.headline, *(f"  {line}" for line in detail.splitlines())])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Failure:
        """Raises ValueError unless `values` is what `to_json` makes."""
        kinds = {"rank": int, "host": str, "time": (int, float), "kind": str, "message": str, "traceback": str}
        kinds |= {"for_user": bool, "step": (int, type(None)), "phase": (str, type(None)), "log": str}
        required = {"rank", "host", "time", "kind", "message"}
        wrong = [key for key, value in values.items() if key not in kinds or not isinstance(value, kinds[key])]
        if wrong or not required <= values.keys():
            raise ValueError(f"no failure record: {wrong or sorted(required - values.keys())}")
        return Failure(**values)


def stamp(error: BaseException) -> None:
    """Called where an error is first seen, before this rank leaves the process group: the others notice that, and one
    that is quicker to record its complaint must not be taken for the cause."""
    with contextlib.suppress(AttributeError):  # an exception class that takes no attributes
        error.__dict__.setdefault("lockstep_time", time.time())


def record(folder: Path, rank: int, error: BaseException) -> None:
    """Called in the failing process, whatever state it is in."""
    failure = Failure(
        rank=rank,
        host=socket.gethostname(),
        time=getattr(error, "lockstep_time", time.time()),
        kind=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        for_user=isinstance(error, UserError),
    )
    staged = folder / f"rank-{rank}.json.tmp"
    staged.write_text(json.dumps(failure.to_json()))
    os.replace(staged, folder / f"rank-{rank}.json")  # a reader never sees half a record


@dataclass(frozen=True)
class Exit:
    """How a rank ended; `failure` unless it is done, or has left as it was asked to."""

    code: int
    seen: float  # when its launcher noticed
    failure: Failure | None = None

    @property
    def well(self) -> bool:
        return self.code in (0, LEFT)

    @property
    def certain(self) -> bool:
        """Killed by a signal, and not by its own abort, which may be a consequence of what happened elsewhere; or gone
        without an exception: whoever loses the others complains about it."""
        if self.failure is not None and self.failure.kind == EXIT:
            return True
        return self.code < 0 and self.code != -signal.SIGABRT


def first(ended: Mapping[int, Exit]) -> Failure | None:
    """The culprit among the ranks that ended by themselves: one that was killed or is gone without a word, or else
    whoever failed earliest.

    Such a process leaves no record, and the others notice within milliseconds that it is gone.
    """
    killed = [end for end in ended.values() if end.certain]
    found = killed or [end for end in ended.values() if not end.well]
    failures = [end.failure for end in found if end.failure is not None]
    return min(failures, key=lambda failure: failure.time, default=None)


@dataclass(frozen=True)
class Scene:
    """What a launcher knows about a rank that has just ended, and where to look for more."""

    rank: int
    host: str
    folder: Path
    log: Path | None
    log_began: int = 0  # the log's size when this rank was started
    oom_kills_before: int = 0


def examine(scene: Scene, code: int, seen: float) -> Exit:
    """The rank's own record if it left one, else what its exit code and the machine tell."""
    if code in (0, LEFT):
        return Exit(code, seen)
    failure = _recorded(scene) or _unrecorded(scene, code, seen)
    view = heartbeat.read(scene.folder / f"heartbeat-{scene.rank}")
    return Exit(
        code,
        seen,
        replace(
            failure,
            host=scene.host,
            step=view.step if view else None,
            phase=view.phase if view else None,
            log=_last_lines(scene.log, scene.log_began),
        ),
    )


def _recorded(scene: Scene) -> Failure | None:
    try:
        values = json.loads((scene.folder / f"rank-{scene.rank}.json").read_text())
        return Failure.from_json(values)
    except (OSError, ValueError):
        return None


def _unrecorded(scene: Scene, code: int, seen: float) -> Failure:
    if code > 0:
        return Failure(scene.rank, scene.host, seen, EXIT, f"ended with code {code}")
    name, message = signal_name(-code), "ended by this signal"
    if name == "SIGKILL":
        now = oom_kills()
        message = "killed from outside"
        if now > scene.oom_kills_before:
            message = f"out of host memory (cgroup oom_kill went from {scene.oom_kills_before} to {now})"
    elif name == "SIGBUS":
        message = f"a mapped file had no room or no data: /dev/shm has {_free('/dev/shm')} bytes free"
    elif name == "SIGSEGV":
        message = "invalid access to memory, in code that is not Python"
    return Failure(scene.rank, scene.host, seen, name, message, traceback=_stacks(scene))


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"SIG{number}"


def _stacks(scene: Scene) -> str:
    """Where the process was when it crashed, as faulthandler wrote it: the main thread, most recent call first."""
    try:
        text = (scene.folder / f"stacks-{scene.rank}").read_text(errors="replace")
    except OSError:
        return ""
    frames = stacks.main_thread(text)
    return "\n".join([f"at: {stacks.line_of(frames)}", *(f"  {frame}" for frame in frames)]) if frames else ""


def _last_lines(log: Path | None, began: int) -> str:
    if log is None:
        return ""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(began, size - 100_000))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-LOG_LINES:])


def oom_kills() -> int:
    """How many processes of this control group the kernel has killed for memory; 0 where it does not say."""
    for path in _memory_files():
        try:
            words = path.read_text().split()
        except OSError:
            continue
        if "oom_kill" in words[:-1]:
            return int(words[words.index("oom_kill") + 1])
    return 0


def _memory_files() -> list[Path]:
    """The group's own file, or the one at the top as a container sees it; version 2 before version 1."""
    root, found = Path("/sys/fs/cgroup"), []
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    for _, controllers, group in groups:
        if not controllers:
            found += [root / group.strip("/") / "memory.events", root / "memory.events"]
        elif "memory" in controllers.split(","):
            found += [root / "memory" / place / "memory.oom_control" for place in (group.strip("/"), "")]
    return found


def _free(path: str) -> int:
    try:
        status = os.statvfs(path)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize
