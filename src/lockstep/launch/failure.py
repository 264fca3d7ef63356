"""Failures of ranks: the failure record that a failing rank writes, and what is known of a rank that wrote none.

Failure records are JSON files in the attempt's folder. The launcher examines every rank that has ended and picks the
root failure, so that the user sees the error that came first and not its consequences.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import time
import traceback
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from lockstep.errors import OutOfStep, Preempted, SmallerMicroBatch, UserError
from lockstep.launch import records
from lockstep.launch.hangs import stacks
from lockstep.runtime import heartbeat

# The exit code of a rank that saved and exited on request, and all codes of ranks that did not fail.
PREEMPTED = Preempted.CODE
CLEAN = (0, PREEMPTED)

# Who says that something failed: a rank, with its exception; the kernel, with a signal; or the launcher.
Origin = Literal["exception", "signal", "launcher"]


class Kind(StrEnum):
    """Kinds of failures whose origin is the launcher."""

    NODE = "node"  # a machine is lost, or too few machines joined
    ZYGOTE = "zygote"  # the process that starts the ranks of a node ended
    HANG = "hang"
    OVERDUE = "overdue"  # ranks that were asked to save did not exit in time
    EXIT = "exit"  # a rank ended without an exception before its work was done


# Messages of torch (gloo, NCCL and the store) in a rank whose peer is gone. Other libraries may say the same about some
# server, so only torch's own exceptions count.
_LOST_PEER = re.compile(
    r"connection (?:was )?(?:likely )?(?:closed|reset)|broken pipe|socket (?:timeout|error)|failed to recv, got 0 bytes"
    r"|remote process exited|ncclRemoteError|caused pair closure|connect(?:ion)? .*refused|timed out waiting",
    re.IGNORECASE,
)
_TORCH_ERRORS = {"RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}

# Warnings of torch's native code, about name servers for example, which do not explain a failure.
_TORCH_WARNING = re.compile(r"\[W\S+ \S+ \w+\.cpp")

# Lines in a log that say why a process aborted: an uncaught C++ exception, a damaged heap, a failed assertion.
_ABORT_REASON = re.compile(
    r"^\s*what\(\):\s*(.+)"
    r"|^((?:free|malloc|realloc|munmap_chunk)\b.*|double free.*|corrupted .*|.*Assertion .*failed.*)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Failure:
    """Why an attempt ended: which rank failed, where and when."""

    rank: int | None  # None if the failure concerns no rank: a lost node that had none, for example
    host: str
    time: float
    kind: str  # the exception's type, the signal's name, or a `Kind`, depending on `origin`
    message: str
    traceback: str = ""
    for_user: bool = False  # whether the message says what to do; then no traceback is shown
    step: int | None = None
    phase: str | None = None
    log: str = ""  # the last lines that the rank wrote
    cause: str = ""  # see `UserError`
    origin: Origin = "exception"  # the only one of which ranks write records

    @classmethod
    def noticed(
        cls, kind: Kind, message: str, rank: int | None = None, host: str = "", when: float | None = None, **others: Any
    ) -> Failure:
        """Return a failure that the launcher has noticed: now, or at the time `when`. `others` are other fields."""
        return cls(rank, host, time.time() if when is None else when, kind, message, origin="launcher", **others)

    def noticed_as(self, *kinds: Kind) -> bool:
        """Return whether the launcher has noticed this failure, as one of these kinds."""
        return self.origin == "launcher" and self.kind in kinds

    def raised_as(self, error: type[BaseException]) -> bool:
        """Return whether a rank raised this exception. A record has only its name."""
        return self.origin == "exception" and self.kind == error.__name__

    @property
    def asks_for_smaller_micro_batch(self) -> bool:
        """Whether micro_batch=auto asks for a smaller micro-batch: the only exception that a restart fixes."""
        return self.raised_as(SmallerMicroBatch)

    @property
    def likely_to_repeat(self) -> bool:
        """Whether this is an exception or an exit code, which the same program would most likely repeat."""
        return self.noticed_as(Kind.EXIT) or (self.origin == "exception" and not self.asks_for_smaller_micro_batch)

    @property
    def reports_lost_peer(self) -> bool:
        """Whether the failure only says that another rank is gone: a torch exception, or the abort that followed it."""
        torch_raised = self.origin == "exception" and self.kind in _TORCH_ERRORS
        aborted = self.origin == "signal" and self.kind == signal.SIGABRT.name
        return (torch_raised or aborted) and bool(_LOST_PEER.search(self.message))

    @property
    def headline(self) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(self.time))
        if self.noticed_as(Kind.NODE, Kind.ZYGOTE) or self.raised_as(OutOfStep):
            return f"lockstep: {self.message} ({when})"

        where = f"step {self.step}, phase {self.phase}, " if self.step is not None else ""

        return f"lockstep: rank {self.rank} on {self.host} failed at {where}{when}: {self.kind}: {self.message}"

    @staticmethod
    def read(path: Path) -> Failure:
        """Read the failure record of a rank. Raises ValueError if there is none, or if it is not valid."""
        return records.parse(Failure, json.loads(records.read(path)))

    def text(self) -> str:
        if self.for_user:
            return f"lockstep: {self.message}"

        # A smaller micro-batch is a request, not an error of the program; and for OutOfStep, the traceback of the rank
        # that noticed it does not help.
        headline_only = self.asks_for_smaller_micro_batch or self.raised_as(OutOfStep)
        detail = [] if headline_only else stacks.fold(self.traceback)
        last_lines = [] if headline_only else self.log.rstrip().splitlines()

        # After a crash the stack and the last lines of the log are shown. An exception's traceback is in both.
        if detail and last_lines and self.origin == "signal":
            detail += ["its last lines:", *(f"  {line}" for line in last_lines)]

        return "\n".join([self.headline, *(f"  {line}" for line in detail or last_lines)])


# ---- in the failing rank ----


def stamp(error: BaseException) -> None:
    """Note the time of an error where it is first seen, before this rank leaves the process group.

    The other ranks notice that this rank is gone, and one of them may record its own error first. The stamps still
    show which error came first.
    """
    # Some exception classes take no attributes.
    with contextlib.suppress(AttributeError):
        error.__dict__.setdefault("lockstep_time", time.time())


def note_end(folder: Path, rank: int, exit_line: str = "") -> None:
    """Note that this rank's work has ended as planned, because `os._exit(0)` too early has the same exit code.

    `exit_line`: FILE:LINE where the program called sys.exit(), if it did.
    """
    with contextlib.suppress(OSError):  # the launcher may have ended, and removed the folder
        _end_note(folder, rank).write_text(exit_line)


def raising_line(error: BaseException) -> str:
    """Return FILE:LINE of the line that raised an error, in the user's code if it went through any; "" if unknown."""
    frames = [stacks.Frame(f.filename, str(f.lineno), f.name) for f in traceback.extract_tb(error.__traceback__)]

    # wandb, for example, replaces sys.exit by a function of its own.
    users = [frame for frame in frames if frame.in_user_code]
    return next((f"{frame.file}:{frame.line}" for frame in reversed(users or frames)), "")


def _end_note(folder: Path, rank: int) -> Path:
    return folder / f"ended-{rank}"


def record(folder: Path, rank: int, error: BaseException) -> None:
    """Write the failure record of this rank. For OutOfStep it names the rank at fault, not the rank that noticed."""
    at_fault = error.ranks if isinstance(error, OutOfStep) else []
    failure = Failure(
        rank=min(at_fault, default=rank),
        host=socket.gethostname(),
        time=getattr(error, "lockstep_time", time.time()),
        kind=type(error).__name__,
        # A hook of the user adds its name as a note.
        message="\n".join([str(error), *getattr(error, "__notes__", ())]),
        traceback="".join(traceback.format_exception(error)),
        for_user=isinstance(error, UserError),
        cause=error.cause if isinstance(error, UserError) else "",
    )
    records.write(folder / f"rank-{rank}.json", json.dumps(asdict(failure)))


def leave_exception(folder: Path, rank: int, error: Exception) -> None:
    """Leave this rank's exception, as an object, for the process that called `lockstep.fit`: see `load_exception`."""
    import cloudpickle

    # An exception that cannot be pickled is reported by its type and its text alone.
    with contextlib.suppress(Exception):
        (folder / f"error-{rank}").write_bytes(cloudpickle.dumps(error))


# ---- in the launcher ----


def load_exception(folder: Path, failure: Failure) -> Exception | None:
    """Return the exception behind a failure, if its rank has left it in `folder`.

    Unpickling runs code, so the folder must be private to this process and the ranks that it has started.
    """
    if failure.origin != "exception" or failure.rank is None:
        return None

    import cloudpickle

    # Unpickling may raise anything; then the text of the failure must do. Classes of a notebook's cells come back as
    # the same classes: cloudpickle remembers those that it has sent.
    with contextlib.suppress(Exception):
        error = cloudpickle.loads((folder / f"error-{failure.rank}").read_bytes())
        if isinstance(error, Exception) and failure.raised_as(type(error)):
            return error

    return None


@dataclass(frozen=True)
class RankExit:
    """How a rank ended, with its failure unless the rank finished or was preempted."""

    code: int
    failure: Failure | None = None
    exit_line: str = ""  # FILE:LINE of the sys.exit(0) that ended the rank, if one did

    @property
    def clean(self) -> bool:
        return self.code in CLEAN and self.failure is None

    @property
    def may_be_a_consequence(self) -> bool:
        """Whether the exit of another rank may have led to this one.

        A rank that has lost its peers raises, or aborts. So it has not if a signal other than SIGABRT killed this rank,
        or if it exited without an exception.
        """
        killed = self.code < 0 and self.code != -signal.SIGABRT
        return not killed and not (self.failure is not None and self.failure.noticed_as(Kind.EXIT))

    @property
    def reports_lost_peer(self) -> bool:
        """Whether this rank failed only because another rank is gone."""
        return self.may_be_a_consequence and self.failure is not None and self.failure.reports_lost_peer


def pick_root(exits: dict[int, RankExit]) -> Failure | None:
    """Return the failure that explains the others.

    A rank that died by itself comes first (its exit cannot be a consequence), then a rank that raised an error of its
    own, then a rank that only reports a lost peer; among equals, the earliest. A process that dies leaves no record,
    and its peers record within milliseconds that they lost it, so that time alone would blame one of the peers.
    """
    failures = [
        (rank_exit.may_be_a_consequence, rank_exit.reports_lost_peer, rank_exit.failure.time, rank, rank_exit.failure)
        for rank, rank_exit in exits.items()
        if rank_exit.failure is not None
    ]

    return min(failures)[-1] if failures else None


def left_early(rank: int, host: str, report: Failure, exit_line: str) -> Failure:
    """Return the failure of a rank that ended with code 0 while other ranks still needed it.

    `report`: the failure of a rank that lost it.
    """
    found = f"ended with code 0 while other ranks were training: rank {report.rank} then lost its connection"
    shorter = "look for a loop that is shorter there"
    by_exit = f"sys.exit at {exit_line}; if that is the end of its script, {shorter}"
    why = by_exit if exit_line else f"its script came to its end: {shorter}"
    return Failure.noticed(Kind.EXIT, f"{found} ({why})", rank, host, when=report.time)


@dataclass
class LocalRank:
    """A rank of this node, and the files that show how it ended."""

    number: int
    host: str
    folder: Path
    log: Path | None
    log_began: int = 0  # the size of the log when this rank was started
    oom_kills_before: int | None = None
    pid: int | None = None  # None until the zygote forks it


def examine(rank: LocalRank, code: int, when: float) -> RankExit:
    """Return how a rank ended: from its failure record if there is one, or else from exit code and kernel counters.

    `when`: the time at which its end was noticed.
    """
    end_note = _end_note(rank.folder, rank.number)
    if code == PREEMPTED or (code == 0 and end_note.exists()):
        return RankExit(code, exit_line=records.read(end_note))

    log = records.read(rank.log, rank.log_began, most=100_000) if rank.log else ""
    try:
        failure = Failure.read(rank.folder / f"rank-{rank.number}.json")
    except ValueError:
        failure = _without_record(rank, code, when, log)

    # A failure of another rank, which this rank noticed: `Attempt.root_failure` fills in where that rank was.
    if failure.rank != rank.number:
        return RankExit(code, replace(failure, host=""))

    # The record holds the error; the heartbeat holds the step and phase of the rank.
    view = heartbeat.read(rank.folder / f"heartbeat-{rank.number}")
    if view is not None:
        failure = replace(failure, step=view.step, phase=view.phase)

    last_lines = [line for line in log.splitlines() if not _TORCH_WARNING.match(line)][-10:]

    return RankExit(code, replace(failure, host=rank.host, log="\n".join(last_lines)))


def _without_record(rank: LocalRank, code: int, when: float, log: str) -> Failure:
    if code == 0:
        text = "ended with code 0 before its work was done (os._exit, in the program or in a library)"
        return Failure.noticed(Kind.EXIT, text, rank.number, rank.host, when=when)

    if code > 0:
        return Failure.noticed(Kind.EXIT, f"ended with code {code}", rank.number, rank.host, when=when)

    # Numbers between the named signals are those of real-time signals.
    named = [item.name for item in signal.Signals if item == -code]
    kind = named[0] if named else f"SIG{-code}"
    message = _explain_signal(kind, rank.oom_kills_before, log)

    # A rank cannot react to SIGKILL: any stack on file is from an earlier hang check. Otherwise the
    # crash was most likely in the main thread, so threads of torch are left out.
    dumped = "" if code == -signal.SIGKILL else records.read(rank.folder / f"stacks-{rank.number}")
    detail = stacks.describe(stacks.main_thread(dumped))

    return Failure(rank.number, rank.host, when, kind, message, traceback="\n".join(detail), origin="signal")


def _explain_signal(name: str, oom_kills_before: int | None, log: str) -> str:
    """Return what the signal that ended a rank says about the cause. `log` is what the rank has written."""
    match name:
        case "SIGKILL":
            # The kernel uses SIGKILL, and no other signal, when memory runs out.
            after = oom_kills()
            if oom_kills_before is None or after is None:
                return "killed; cannot tell whether by the kernel's OOM killer"
            if after > oom_kills_before:
                return f"out of host memory (cgroup oom_kill went from {oom_kills_before} to {after})"

            return "killed, but not by the kernel's OOM killer"

        case "SIGBUS":
            # The usual cause is a full /dev/shm, through which worker processes share batches.
            free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 0
            return f"a mapped file had no room or no data: /dev/shm has {free} bytes free"

        case "SIGSEGV":
            return "segmentation fault in native code"

        case "SIGABRT":
            reasons = [found[1] or found[2] for found in _ABORT_REASON.finditer(log)]
            if reasons:
                return f"native code aborted: {reasons[-1]}"

            return "native code aborted (a failed assertion, a damaged heap, or an uncaught C++ exception)"

        case _:
            return "killed by this signal"


def oom_kills() -> int | None:
    """Return how many processes of this cgroup the kernel has killed for lack of memory; None if that is not known."""
    counts = (re.search(r"\boom_kill (\d+)", records.read(path)) for path in _memory_files())
    return next((int(count[1]) for count in counts if count), None)


def _memory_files() -> list[Path]:
    """Return the files that may hold the count: the cgroup's own file, or the file at the top, as in a container."""
    root = Path("/sys/fs/cgroup")
    paths = []
    for line in records.read(Path("/proc/self/cgroup")).splitlines():
        # cgroup v2 has one group for all controllers, v1 has one group for each.
        _, controllers, group = line.split(":", 2)
        if not controllers:
            paths += [root / group.strip("/") / "memory.events", root / "memory.events"]
        elif "memory" in controllers.split(","):
            paths += [root / "memory" / folder / "memory.oom_control" for folder in (group.strip("/"), "")]

    return paths
