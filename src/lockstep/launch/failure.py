"""Failures: why an attempt ended, and which of several failures explains the others.

A failing rank writes its failure as a record (`ranks/rank_record.py`). For a rank that wrote none, the agent of its
node works it out (`ranks/post_mortem.py`). The coordinator then picks the root failure, so that the user sees the error
that came first and not its consequences.
"""

from __future__ import annotations

import re
import signal
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from lockstep.errors import OutOfStep, Preempted, SmallerMicroBatch
from lockstep.launch import frames

# The exit code of a rank that saved and exited on request, and all codes of ranks that did not fail.
PREEMPTED = Preempted.CODE
CLEAN = (0, PREEMPTED)

# Who says that something failed: a rank, with its exception; the kernel, with a signal; or the launcher.
Origin = Literal["exception", "signal", "launcher"]


class LauncherFailure(StrEnum):
    """Kinds of failures whose origin is the launcher."""

    NODE = "node"  # a machine is lost, or too few machines joined
    ZYGOTE = "zygote"  # the process that starts the ranks of a node ended
    FORK = "fork"  # the system refused the process of a rank
    HANG = "hang"
    OVERDUE = "overdue"  # ranks that were asked to save did not exit in time
    EXIT = "exit"  # a rank ended without an exception before its work was done


# What gloo, NCCL and torch's store say in a rank whose peer is gone.
_LOST_PEER = re.compile(
    r"connection (?:was )?(?:likely )?(?:closed|reset)|broken pipe|socket (?:timeout|error)|failed to recv, got 0 bytes"
    r"|remote process exited|ncclRemoteError|caused pair closure|connect(?:ion)? .*refused|timed out waiting",
    re.IGNORECASE,
)

# A dataset may say the same about some server, so only exceptions of torch count: those that have a class of their own,
# and the RuntimeErrors of gloo. Their text names the line of C++ that raised it: "[.../tcp/pair.cc:537] ..."; the one
# exception is a collective after one that timed out.
_TORCH_ERRORS = {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}
_RAISED_BY_GLOO = re.compile(
    r"\[(?:enforce fail at )?\S+\.(?:cc|h):\d+\]|^Application timeout caused pair closure", re.MULTILINE
)


@dataclass(frozen=True)
class Failure:
    """Why an attempt ended: which rank failed, where and when."""

    rank: int | None  # None if the failure concerns no rank: a lost node that had none, for example
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
    origin: Origin = "exception"

    @classmethod
    def by_launcher(
        cls,
        kind: LauncherFailure,
        message: str,
        rank: int | None = None,
        host: str = "",
        *,
        when: float | None = None,
        step: int | None = None,
        phase: str | None = None,
        traceback: str = "",
        log: str = "",
        cause: str = "",
    ) -> Failure:
        """Return a failure that the launcher has noticed: now, or at the time `when`."""
        return cls(
            rank,
            host,
            time.time() if when is None else when,
            kind,
            message,
            traceback=traceback,
            step=step,
            phase=phase,
            log=log,
            cause=cause,
            origin="launcher",
        )

    def is_one_of(self, *kinds: LauncherFailure) -> bool:
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
        """Whether the program raised, or exited with a code, and so would most likely fail again.

        An exception of torch that only reports a lost peer does not count: the network may be to blame.
        """
        if self.asks_for_smaller_micro_batch or self.reports_lost_peer:
            return False

        return self.origin == "exception" or self.is_one_of(LauncherFailure.EXIT)

    @property
    def reports_lost_peer(self) -> bool:
        """Whether the failure only says that another rank is gone: a torch exception, or the abort that followed it."""
        aborted = self.origin == "signal" and self.kind == signal.SIGABRT.name
        return (aborted or self._raised_by_torch) and bool(_LOST_PEER.search(self.message))

    @property
    def _raised_by_torch(self) -> bool:
        """Whether the exception is one of torch: by its class, or by its text, for gloo's."""
        gloo_raised = self.kind == "RuntimeError" and bool(_RAISED_BY_GLOO.search(self.message))
        return self.origin == "exception" and (self.kind in _TORCH_ERRORS or gloo_raised)

    @property
    def headline(self) -> str:
        """The first line of the failure: which rank, where, when, and the error."""
        when = time.strftime("%H:%M:%S", time.localtime(self.time))
        if self.is_one_of(LauncherFailure.NODE, LauncherFailure.ZYGOTE) or self.raised_as(OutOfStep):
            return f"lockstep: {self.message} ({when})"

        where = f"step {self.step}, phase {self.phase}, " if self.step is not None else ""

        return f"lockstep: rank {self.rank} on {self.host} failed at {where}{when}: {self.kind}: {self.message}"

    def text(self) -> str:
        """Return the failure as the screens show it: the headline, and what helps to find the cause."""
        if self.for_user:
            return f"lockstep: {self.message}"

        # A smaller micro-batch is a request, not an error of the program; and for OutOfStep, the traceback of the rank
        # that noticed it does not help.
        if self.asks_for_smaller_micro_batch or self.raised_as(OutOfStep):
            return self.headline

        # After a crash the stack and the last lines of the log are shown. An exception's traceback is in both.
        detail = frames.fold(self.traceback)
        last_lines = self.log.rstrip().splitlines()
        if detail and last_lines and self.origin == "signal":
            detail += ["its last lines:", *(f"  {line}" for line in last_lines)]

        shown = detail or last_lines
        return "\n".join([self.headline, *(f"  {line}" for line in shown)])


# ---- how ranks ended, and which of them is to blame ----


@dataclass(frozen=True)
class RankExit:
    """How a rank ended, with its failure unless the rank finished or was preempted."""

    code: int
    failure: Failure | None = None
    exit_line: str = ""  # FILE:LINE of the sys.exit(0) that ended the rank, if one did

    @property
    def clean(self) -> bool:
        """Whether the rank finished, or saved and exited as it was asked to."""
        return self.code in CLEAN and self.failure is None

    @property
    def may_be_a_consequence(self) -> bool:
        """Whether the exit of another rank may have led to this one.

        A rank that has lost its peers raises, or aborts. So it has not if a signal other than SIGABRT killed this rank,
        or if it exited without an exception, or never started.
        """
        killed = self.code < 0 and self.code != -signal.SIGABRT
        never_raised = self.failure is not None and self.failure.is_one_of(LauncherFailure.EXIT, LauncherFailure.FORK)
        return not killed and not never_raised

    @property
    def reports_lost_peer(self) -> bool:
        """Whether this rank failed only because another rank is gone."""
        return self.may_be_a_consequence and self.failure is not None and self.failure.reports_lost_peer


def pick_root(exits: dict[int, RankExit]) -> int | None:
    """Return the rank whose failure explains the others; None if no rank has failed.

    A rank that died by itself comes first (its exit cannot be a consequence), then a rank that raised an error of its
    own, then a rank that only reports a lost peer; among equals, the earliest. A process that dies leaves no record,
    and its peers record within milliseconds that they lost it, so time alone would blame one of the peers.
    """
    # False sorts before True, and the rank breaks ties.
    failures = []
    for rank, rank_exit in exits.items():
        failure = rank_exit.failure

        if failure is not None:
            failures.append((rank_exit.may_be_a_consequence, rank_exit.reports_lost_peer, failure.time, rank))

    return min(failures)[-1] if failures else None


def left_early(rank: int, host: str, report: Failure, exit_line: str) -> Failure:
    """Return the failure of a rank that ended with code 0 while other ranks still needed it.

    `report`: the failure of a rank that lost it.
    """
    found = f"ended with code 0 while other ranks were training: rank {report.rank} then lost its connection"

    shorter = "look for a loop that is shorter there"
    by_exit = f"sys.exit at {exit_line}; if that is the end of its script, {shorter}"
    why = by_exit if exit_line else f"its script came to its end: {shorter}"
    return Failure.by_launcher(LauncherFailure.EXIT, f"{found} ({why})", rank, host, when=report.time)
