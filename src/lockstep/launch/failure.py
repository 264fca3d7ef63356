"""Failures: the reason why an attempt ended, and which of several failures explains the others.

A failing rank writes its failure as a record (`ranks/rank_record.py`). If it wrote no record, the agent of its node
works out the failure (`ranks/post_mortem.py`). The coordinator then picks the root failure, so that the user sees the
error that came first and not its consequences.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, get_args

from lockstep.errors import ExitCode, OutOfStep, SmallerMicroBatch
from lockstep.launch import frames

# The exit codes of ranks that did not fail: they have finished, or exited as they were asked to.
CLEAN = (0, ExitCode.RESTART.value)

# Who has noticed a failure: its rank, which raised an exception; the kernel, which sent a signal; or the launcher.
Origin = Literal["exception", "signal", "launcher"]

# Whether a failure only reports that another rank is gone, as exceptions of torch and aborts of NCCL do. "unread": an
# abort whose reason the launcher cannot read, so that it may be such a report. The order of these words matters, see
# `Failure.root_order`.
LostPeer = Literal["no", "unread", "yes"]


@dataclass(frozen=True)
class FailureTraits:
    """The facts about a kind of failure that decide what follows it."""

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
    """Kinds of failures whose origin is the launcher."""

    # A node is lost, or too few nodes joined.
    NODE = "node"

    # The process that starts the ranks of a node ended, or could not import the program.
    ZYGOTE = "zygote"
    IMPORT = "import"

    # The system refused the process of a rank.
    FORK = "fork"

    # A node could not set up its ranks: no room for their folder, or a run folder that it cannot write to, or no
    # process for its zygote.
    SETUP = "setup"

    # No rank advances. In a deadlock the ranks' collectives prove that none can: more time would not help.
    HANG = "hang"
    DEADLOCK = "deadlock"

    # Ranks that were asked to save did not exit within `restart.grace`.
    GRACE_EXCEEDED = "grace exceeded"

    # A rank ended without an exception before its work was done.
    EXIT = "exit"


# The traits of the failures that the launcher notices. Every other one has none, nor has a signal.
TRAITS: dict[LauncherFailure, FailureTraits] = {
    LauncherFailure.IMPORT: FailureTraits(dismisses_node=True, likely_to_repeat=True),
    LauncherFailure.SETUP: FailureTraits(dismisses_node=True, likely_to_repeat=True),
    LauncherFailure.HANG: FailureTraits(hangs=True),
    LauncherFailure.DEADLOCK: FailureTraits(hangs=True, likely_to_repeat=True),
    LauncherFailure.EXIT: FailureTraits(likely_to_repeat=True),
}

# The traits of exceptions, which their ranks record. Every other one is an error of the program.
PROGRAM_ERROR = FailureTraits(likely_to_repeat=True)
EXCEPTION_TRAITS: dict[type[BaseException], FailureTraits] = {
    SmallerMicroBatch: FailureTraits(asks_for_smaller_micro_batch=True),
    OutOfStep: FailureTraits(likely_to_repeat=True, names_other_ranks=True),
}


@dataclass(frozen=True)
class Failure:
    """The reason why an attempt ended: the rank or node that failed, where and when."""

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
    lost_peer: LostPeer = "no"
    origin: Origin = "exception"
    traits: FailureTraits = FailureTraits()
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
        traits = TRAITS.get(kind, FailureTraits())
        now = time.time() if when is None else when
        return cls(rank, host, now, kind, message, origin="launcher", traits=traits, **details)

    def noticed_as(self, kind: LauncherFailure) -> bool:
        """Return whether this is a failure of this kind, which only the launcher notices."""
        return self.origin == "launcher" and self.kind == kind

    def raised_as(self, error: type[BaseException]) -> bool:
        """Return whether a rank raised this exception. A record has only its name."""
        return self.origin == "exception" and self.kind == error.__name__

    @property
    def from_outside(self) -> bool:
        """Whether a rank was ended from outside: no failure of another rank can have led to this one."""
        # SIGKILL, and the refusal of a fork. A rank that has lost its peers may crash while it cleans up, or leave with
        # any code, so nothing else is certain.
        was_killed = self.origin == "signal" and self.kind == "SIGKILL"
        return was_killed or self.noticed_as(LauncherFailure.FORK)

    @property
    def root_order(self) -> tuple[bool, int, float]:
        """The key by which failures are sorted: the smallest is the root failure, which explains the others.

        A rank that was ended from outside comes first, and those that only report a lost peer come last; among equals,
        the earliest. Time alone would pick one of the peers: a process that dies leaves no record, and its peers record
        within milliseconds that they lost it.
        """
        return not self.from_outside, get_args(LostPeer).index(self.lost_peer), self.time

    @property
    def likely_to_repeat(self) -> bool:
        """Whether the program raised, or exited with a code, and so would most likely fail again.

        An exception of torch that only reports a lost peer does not count: the network may be to blame.
        """
        return self.traits.likely_to_repeat and self.lost_peer != "yes"

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


# ---- how ranks ended, and whose failure explains the others ----

# The outcome of a save, of ranks that were asked to save and exit. "nothing": there was nothing to save yet.
SaveOutcome = Literal["saved", "failed", "nothing"]


@dataclass(frozen=True)
class RankExit:
    """How a rank ended, with its failure unless the rank finished, or exited as it was asked to."""

    code: int
    failure: Failure | None = None
    exit_line: str = ""  # FILE:LINE of the sys.exit(0) that ended the rank, if one did
    save_outcome: SaveOutcome | None = None  # None if the rank was not asked to save and exit
    save_step: int | None = None  # the step that it saved, or failed to save

    @classmethod
    def as_asked(cls, outcome: SaveOutcome, step: int | None = None) -> RankExit:
        """Return the end of a rank that was asked to save and exit."""
        return cls(ExitCode.RESTART.value, save_outcome=outcome, save_step=step)

    @property
    def clean(self) -> bool:
        """Whether the rank finished, or exited as it was asked to."""
        return self.failure is None and self.code == (ExitCode.RESTART if self.save_outcome else ExitCode.FINISHED)


def pick_root(exits: dict[int, RankExit]) -> int | None:
    """Return the rank whose failure explains the others; None if no rank has failed."""
    failures = {rank: rank_exit.failure for rank, rank_exit in exits.items() if rank_exit.failure is not None}
    return min(failures, key=lambda rank: (failures[rank].root_order, rank), default=None)


def left_early(rank: int, host: str, report: Failure, exit_line: str) -> Failure:
    """Return the failure of a rank that ended with code 0 while other ranks still needed it.

    `report`: the failure of a rank that lost it.
    """
    then = "lost its connection" if report.lost_peer == "yes" else "aborted"
    found = f"ended with code 0 while other ranks were training: rank {report.rank} then {then}"

    shorter = "look for a loop that is shorter there"
    by_exit = f"sys.exit at {exit_line}; if that is the end of its script, {shorter}"
    why = by_exit if exit_line else f"its script came to its end: {shorter}"
    return Failure.by_launcher(LauncherFailure.EXIT, f"{found} ({why})", rank, host, when=report.time)
