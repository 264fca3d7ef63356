"""Failures: why an attempt ended, and which of several failures explains the others.

A failing rank writes its failure as a record (`ranks/rank_record.py`). For a rank that wrote none, the agent of its
node works it out (`ranks/post_mortem.py`). The coordinator then picks the root failure, so that the user sees the error
that came first and not its consequences.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, Literal

from lockstep.errors import ExitCode, OutOfStep, SmallerMicroBatch
from lockstep.launch import frames, lost_peer

# The exit codes of ranks that did not fail: they have finished, or exited as they were asked to.
CLEAN = (0, ExitCode.RESTART.value)

# Who says that something failed: a rank, with its exception; the kernel, with a signal; or the launcher.
Origin = Literal["exception", "signal", "launcher"]


@dataclass(frozen=True)
class FailureTraits:
    """What is known about a kind of failure. The defaults are those of a signal."""

    # The same program would most likely fail in the same way again, so a restart needs progress.
    likely_to_repeat: bool = False

    # The node would fail in the same way again: the job does without it, if it can.
    dismisses_node: bool = False

    # micro_batch=auto asks for a smaller micro-batch: the only exception that a restart fixes.
    asks_for_smaller_micro_batch: bool = False

    # No rank advanced: `hang.action` applies.
    hangs: bool = False

    # The message names the ranks that are out of step. The rank that noticed it, and its traceback, do not help.
    names_other_ranks: bool = False


class LauncherFailure(StrEnum):
    """Kinds of failures whose origin is the launcher, with what is known about each."""

    traits: FailureTraits

    def __new__(cls, value: str, traits: FailureTraits) -> LauncherFailure:
        member = str.__new__(cls, value)
        member._value_ = value
        member.traits = traits
        return member

    # A machine is lost, or too few machines joined.
    NODE = "node", FailureTraits()

    # The process that starts the ranks of a node ended, or could not import the program.
    ZYGOTE = "zygote", FailureTraits()
    IMPORT = "import", FailureTraits(dismisses_node=True, likely_to_repeat=True)

    # The system refused the process of a rank.
    FORK = "fork", FailureTraits()

    # A node could not set up its ranks: no room for their folder, or a run folder that it cannot write to.
    SETUP = "setup", FailureTraits(dismisses_node=True, likely_to_repeat=True)

    # No rank advances. In a deadlock the ranks' collectives prove that none can: more time would not help.
    HANG = "hang", FailureTraits(hangs=True)
    DEADLOCK = "deadlock", FailureTraits(hangs=True, likely_to_repeat=True)

    # Ranks that were asked to save did not exit in time.
    OVERDUE = "overdue", FailureTraits()

    # A rank ended without an exception before its work was done.
    EXIT = "exit", FailureTraits(likely_to_repeat=True)


# What is known about exceptions, by their names: a record has no more. All others are errors of the program.
EXCEPTIONS = {
    SmallerMicroBatch.__name__: FailureTraits(asks_for_smaller_micro_batch=True),
    OutOfStep.__name__: FailureTraits(likely_to_repeat=True, names_other_ranks=True),
}
ERROR_OF_PROGRAM = FailureTraits(likely_to_repeat=True)


# What is known of an abort of rank 0: it writes to the terminal, so the launcher cannot read the reason.
ABORTED_UNREAD = "native code aborted; if it gave a reason, that is on the terminal"


@dataclass(frozen=True)
class Failure:
    """Why an attempt ended: which rank or node failed, where and when."""

    rank: int | None  # None if no rank has failed, but a node, or the job as a whole
    host: str
    time: float
    kind: str  # the exception's type, the signal's name, or a `LauncherFailure`, depending on `origin`
    message: str
    traceback: str = ""
    for_user: bool = False  # whether the message says what to do; then no traceback is shown
    step: int | None = None
    phase: str | None = None
    log: str = ""  # the last lines that the rank wrote
    cause: str = ""  # see `UserError`
    follows_lost_peer: bool = False  # `lost_peer.follows`
    origin: Origin = "exception"
    node: int | None = None  # the node that has failed: its ranks end with it

    @classmethod
    def by_launcher(
        cls,
        kind: LauncherFailure,
        message: str,
        rank: int | None = None,
        host: str = "",
        *,
        when: float | None = None,
        **details: Any,
    ) -> Failure:
        """Return a failure that the launcher has noticed: now, or at the time `when`. `details`: any other field."""
        return cls(rank, host, time.time() if when is None else when, kind, message, origin="launcher", **details)

    @property
    def traits(self) -> FailureTraits:
        """What is known about this kind of failure."""
        match self.origin:
            case "exception":
                return EXCEPTIONS.get(self.kind, ERROR_OF_PROGRAM)
            case "signal":
                return FailureTraits()
            case "launcher":
                # Another node may send any kind.
                known = self.kind in set(LauncherFailure)
                return LauncherFailure(self.kind).traits if known else FailureTraits()

    def noticed_as(self, kind: LauncherFailure) -> bool:
        """Return whether the launcher has noticed a failure of this kind."""
        return self.origin == "launcher" and self.kind == kind

    def raised_as(self, error: type[BaseException]) -> bool:
        """Return whether a rank raised this exception. A record has only its name."""
        return self.origin == "exception" and self.kind == error.__name__

    @property
    def likely_to_repeat(self) -> bool:
        """Whether the program raised, or exited with a code, and so would most likely fail again.

        An exception of torch that only reports a lost peer does not count: the network may be to blame.
        """
        return self.traits.likely_to_repeat and not self.reports_lost_peer

    @property
    def reports_lost_peer(self) -> bool:
        """Whether another rank is gone, and that is all: a torch exception says so, or what followed from it."""
        if self.origin == "exception":
            return self.follows_lost_peer

        aborted = self.origin == "signal" and self.kind == signal.SIGABRT.name
        return aborted and lost_peer.explains_abort(self.message)

    @property
    def aborted_unread(self) -> bool:
        """Whether the failure is an abort whose reason the launcher cannot read, which may be such a report.

        NCCL aborts a rank that has lost a peer. A rank that has done its work waits for no peer.
        """
        return self.origin == "signal" and self.message == ABORTED_UNREAD and self.phase not in ("end", "after run")

    @property
    def headline(self) -> str:
        """The first line of the failure: which rank, where, when, and the error."""
        when = time.strftime("%H:%M:%S", time.localtime(self.time))
        if self.rank is None or self.traits.names_other_ranks:
            return f"lockstep: {self.message} ({when})"

        where = f"step {self.step}, phase {self.phase}, " if self.step is not None else ""

        return f"lockstep: rank {self.rank} on {self.host} failed at {where}{when}: {self.kind}: {self.message}"

    def text(self) -> str:
        """Return the failure as the screens show it: the headline, and what helps to find the cause."""
        if self.for_user:
            return f"lockstep: {self.message}"

        # A smaller micro-batch is a request, not an error of the program.
        if self.traits.asks_for_smaller_micro_batch or self.traits.names_other_ranks:
            return self.headline

        # After a crash the stack and the last lines of the log are shown. An exception's traceback is in both.
        detail = frames.fold(self.traceback)
        last_lines = self.log.rstrip().splitlines()
        if detail and last_lines and self.origin == "signal":
            detail += ["its last lines:", *(f"  {line}" for line in last_lines)]

        shown = detail or last_lines
        return "\n".join([self.headline, *(f"  {line}" for line in shown)])


# ---- how ranks ended, and which of them failed first ----


class Consequence(IntEnum):
    """Whether a rank failed only because another rank is gone, the least likely first."""

    NEVER = 0  # no exit of another rank can have led to this one
    UNLIKELY = 1  # an error of its own, which a peer that died first may still explain
    POSSIBLE = 2  # it aborted for a reason that the launcher cannot read
    CERTAIN = 3  # torch says that a peer is gone


# What became of the save of ranks that were asked to save and exit. "nothing": there was nothing to save yet.
Save = Literal["saved", "failed", "nothing"]


@dataclass(frozen=True)
class RankExit:
    """How a rank ended, with its failure unless the rank finished, or exited as it was asked to."""

    code: int
    failure: Failure | None = None
    exit_line: str = ""  # FILE:LINE of the sys.exit(0) that ended the rank, if one did
    save: Save | None = None  # None if the rank was not asked to save and exit
    save_step: int | None = None  # the step that it saved, or failed to save

    @classmethod
    def as_asked(cls, save: Save, step: int | None = None) -> RankExit:
        """Return the end of a rank that was asked to save and exit."""
        return cls(ExitCode.RESTART.value, save=save, save_step=step)

    @property
    def clean(self) -> bool:
        """Whether the rank finished, or exited as it was asked to."""
        return self.failure is None and self.code == (ExitCode.RESTART if self.save else ExitCode.FINISHED)

    @property
    def consequence(self) -> Consequence:
        """Whether this rank failed only because another rank is gone; UNLIKELY for a rank that has not failed."""
        failure = self.failure
        if failure is None:
            return Consequence.UNLIKELY

        # A rank that has lost its peers raises, or aborts. This one was killed by another signal, or exited without an
        # exception, or was never forked.
        if failure.origin == "launcher" or (failure.origin == "signal" and failure.kind != signal.SIGABRT.name):
            return Consequence.NEVER

        if failure.reports_lost_peer:
            return Consequence.CERTAIN

        return Consequence.POSSIBLE if failure.aborted_unread else Consequence.UNLIKELY


def pick_root(exits: dict[int, RankExit]) -> int | None:
    """Return the rank whose failure explains the others; None if no rank has failed.

    The one that is least likely a consequence comes first; among equals, the earliest, and the rank breaks ties. A
    process that dies leaves no record, and its peers record within milliseconds that they lost it, so time alone would
    pick one of the peers.
    """
    failures = [(end.consequence, end.failure.time, rank) for rank, end in exits.items() if end.failure is not None]
    return min(failures)[-1] if failures else None


def left_early(rank: int, host: str, report: Failure, exit_line: str) -> Failure:
    """Return the failure of a rank that ended with code 0 while other ranks still needed it.

    `report`: the failure of a rank that lost it.
    """
    then = "lost its connection" if report.reports_lost_peer else "aborted"
    found = f"ended with code 0 while other ranks were training: rank {report.rank} then {then}"

    shorter = "look for a loop that is shorter there"
    by_exit = f"sys.exit at {exit_line}; if that is the end of its script, {shorter}"
    why = by_exit if exit_line else f"its script came to its end: {shorter}"
    return Failure.by_launcher(LauncherFailure.EXIT, f"{found} ({why})", rank, host, when=report.time)
