"""Finds out why a rank has ended: from its record or, without one, from its exit code, log and the kernel's counters.

The agent of its node examines every rank that has ended, and sends the result to the coordinator.
"""

from __future__ import annotations

import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

from lockstep import files
from lockstep.launch import frames, lost_peer
from lockstep.launch.failure import CLEAN, Failure, LauncherFailure, LostPeer, RankExit
from lockstep.launch.hangs import stacks
from lockstep.launch.ranks import oom_kills, rank_record
from lockstep.launch.ranks.local_ranks import LocalRank
from lockstep.runtime import attempt_folder, heartbeat

# How much of the end of a log is read, in bytes, and how many of its lines are shown.
LOG_SIZE = 100_000
LAST_LINES = 10

# Where worker processes put the batches that they share with their rank.
SHARED_MEMORY = Path("/dev/shm")

# Warnings of torch's native code, about name servers for example, which do not explain a failure.
_TORCH_WARNING = re.compile(r"\[W\S+ \S+ \w+\.cpp")

# Lines in a log that say why a process aborted: an uncaught C++ exception, a damaged heap, a failed assertion.
_ABORT_REASON = re.compile(
    r"^\s*what\(\):\s*(.+)"
    r"|^((?:free|malloc|realloc|munmap_chunk)\b.*|double free.*|corrupted .*|.*Assertion .*failed.*)$",
    re.MULTILINE,
)


def examine(rank: LocalRank, code: int, when: float) -> RankExit:
    """Return how a rank exited with this code. `when`: the time at which its exit was noticed."""
    record = rank_record.read(rank.folder, rank.number)
    failure = record.failure if record else None

    if failure is None and code in CLEAN:
        planned = _planned_exit(rank, code, record)
        if planned is not None:
            return planned

    # A rank that was killed has left no record.
    log = files.read(rank.log, rank.log_began, most=LOG_SIZE) if rank.log else None
    view = heartbeat.read(attempt_folder.heartbeat(rank.folder, rank.number))
    if failure is None:
        failure = _without_record(rank, code, when, log, view)

    # The failure may be that of another rank, which this rank has noticed. Then its host is not known here:
    # `Attempt.root_failure` finds it.
    if failure.rank != rank.number:
        return RankExit(code, replace(failure, host=""))

    # The record holds the error; the heartbeat holds the step and phase of the rank.
    if view is not None:
        failure = replace(failure, step=view.step, phase=view.phase)

    last_lines = [line for line in (log or "").splitlines() if not _TORCH_WARNING.match(line)][-LAST_LINES:]

    return RankExit(code, replace(failure, host=rank.host, log="\n".join(last_lines)))


def _planned_exit(rank: LocalRank, code: int, record: RankExit | None) -> RankExit | None:
    """Return the exit of a rank that has finished, or exited as it was asked to; None if no record shows that.

    `code` alone does not show it: any library may exit with the same one.
    """
    if record is not None:
        return record if record.code == code else None

    # A full disk leaves an empty record: the rank did exit as planned, but whether it saved is unknown.
    if rank_record.exists(rank.folder, rank.number):
        return RankExit.as_asked("nothing") if code else RankExit(code)

    return None


def _without_record(
    rank: LocalRank, code: int, when: float, log: str | None, view: heartbeat.HeartbeatView | None
) -> Failure:
    """Return the failure of a rank that left no record, by its exit code: a negative one is a signal.

    `log` is what the rank has written; None if that went to the terminal. `view` is its last heartbeat.
    """
    if code == 0:
        text = "ended with code 0 before its work was done (os._exit, in the program or in a library)"
        return Failure.by_launcher(LauncherFailure.EXIT, text, rank.number, rank.host, when=when)

    if code > 0:
        return Failure.by_launcher(LauncherFailure.EXIT, f"ended with code {code}", rank.number, rank.host, when=when)

    kind = signal_name(-code)
    message = _explain_signal(kind, rank.oom_kills.before, log)

    # A rank cannot react to SIGKILL: any stack on file is from an earlier hang check. Otherwise the
    # crash was most likely in the main thread, so threads of torch are left out.
    dumped = "" if code == -signal.SIGKILL else files.read(attempt_folder.stacks(rank.folder, rank.number))
    detail = frames.describe(stacks.main_thread(dumped))

    return Failure(
        rank.number,
        rank.host,
        when,
        kind,
        message,
        traceback="\n".join(detail),
        lost_peer=_lost_peer(code, message, log, view),
        origin="signal",
    )


def _lost_peer(code: int, message: str, log: str | None, view: heartbeat.HeartbeatView | None) -> LostPeer:
    """Return whether a signal ended a rank because it has lost a peer: then NCCL aborts it, and gives that reason."""
    if code != -signal.SIGABRT:
        return "no"

    if log is not None:
        return "yes" if lost_peer.reported_in(message) else "no"

    # A rank that has done its work waits for no peer.
    return "no" if view is not None and heartbeat.PHASES[view.phase].work_done else "unread"


def signal_name(number: int) -> str:
    """Return SIGKILL for 9. Numbers between the named signals are those of real-time signals: SIG40."""
    named = [item.name for item in signal.Signals if item == number]
    return named[0] if named else f"SIG{number}"


def _explain_signal(name: str, oom_kills_before: int | None, log: str | None) -> str:
    """Return what the signal that ended a rank says about the cause.

    `log` is what the rank has written; None if that went to the terminal.
    """
    match name:
        case "SIGKILL":
            # The kernel uses SIGKILL, and no other signal, when memory runs out.
            after = oom_kills.so_far()
            if oom_kills_before is None or after is None:
                return "killed; cannot tell whether by the kernel's OOM killer"

            if after > oom_kills_before:
                return f"out of host memory (cgroup oom_kill went from {oom_kills_before} to {after})"

            return "killed, but not by the kernel's OOM killer"

        case "SIGBUS":
            # The usual cause is that there is no room left for shared memory.
            what = "a mapped file had no room or no data"
            if not SHARED_MEMORY.exists():
                return what

            return f"{what}: {SHARED_MEMORY} has {shutil.disk_usage(SHARED_MEMORY).free} bytes free"

        case "SIGSEGV":
            return "segmentation fault in native code"

        case "SIGABRT":
            if log is None:
                return "native code aborted; if it gave a reason, that is on the terminal"

            reasons = [found[1] or found[2] for found in _ABORT_REASON.finditer(log)]
            if reasons:
                return f"native code aborted: {reasons[-1]}"

            return "native code aborted (a failed assertion, a damaged heap, or an uncaught C++ exception)"

        case _:
            return "killed by this signal"
