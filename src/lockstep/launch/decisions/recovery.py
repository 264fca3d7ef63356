"""Decides what follows a failure, or a request to save and exit: a node fewer, another attempt, or the end of the job.

All rules by which a job loses a node, restarts or ends are here, in functions of the situation that change nothing:

    node_loss              whether the job loses the node that has failed; this is asked first
    after_failure          what follows the failure of an attempt
    after_request          what follows when the ranks were asked to save and exit
    after_second_ctrl_c    how the job ends when its user does not wait for that
    if_none_can_start      how the job ends when no rank runs, and no attempt can follow

`AttemptEnd` and `NextAttempt` carry out what they return.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lockstep.errors import ExitCode, Preempted
from lockstep.launch.failure import Failure, LauncherFailure, SaveOutcome
from lockstep.launch.job import LauncherSettings
from lockstep.launch.wire.messages import JobEnd

# ---- the decisions, which are carried out when the ranks of the attempt are gone ----


@dataclass(frozen=True)
class Restart:
    """Another attempt, from the newest checkpoint, on the nodes that are left."""

    longer_timeouts: bool = False  # work that is only slow must not be taken for a hang again


@dataclass(frozen=True)
class Continue:
    """Another attempt, from the newest checkpoint, for a resize or a new node. It does not count as a restart."""


@dataclass(frozen=True)
class UndoResize:
    """Another attempt, with as many ranks as before the resize."""


@dataclass(frozen=True)
class EndPreempted:
    """The job ends as preempted: it was asked to save and exit, and it can be resumed."""

    reason = "the job was asked to save and exit"


@dataclass(frozen=True)
class End:
    """The job ends. `reason`: why it is not restarted."""

    ending: JobEnd
    reason: str


Decision = Restart | Continue | UndoResize | EndPreempted | End


# Before them: how the job loses a node at once. A dismissed one would join again, and fail again, so its launcher ends.
NodeLoss = Literal["lost", "dismissed"]


# ---- what the decisions depend on ----


@dataclass(frozen=True)
class AttemptFacts:
    """Facts about the attempt that ends. The defaults are for a coordinator that has started none."""

    was_started: bool = False  # its ranks may have trained
    has_saved: bool = False  # it has saved a checkpoint
    save_outcome: SaveOutcome | None = None  # what became of the save of ranks that exited as they were asked to
    any_finished: bool = False  # some rank has ended with code 0


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The state of the job when something calls for a decision."""

    settings: LauncherSettings
    newest_step: int | None = None  # the step of the newest checkpoint
    attempt: AttemptFacts = AttemptFacts()
    recent_restarts: int = 0  # within the last hour
    restarts_in_a_row: int = 0  # without a new checkpoint
    shortage: str | None = None  # how many nodes are left and needed, if they are too few for another attempt
    reached_timeout: bool = False  # ranks hang, or are slow
    preempt_signal: str | None = None  # the signal that asked the job to save and exit, if one did
    first_after_resize: bool = False  # the attempt is the first one after a resize

    @property
    def can_be_resumed(self) -> bool:
        """Whether the job can be resumed later without losing training: it has saved, or has trained no step yet."""
        return self.newest_step is not None or self.attempt.save_outcome in ("saved", "nothing")


# ---- the rules ----


def node_loss(failure: Failure, in_job: bool, can_be_spared: bool) -> NodeLoss | None:
    """Return how the job loses the node that has failed; None if it keeps all its nodes.

    `in_job`: the node still belongs to the job. `can_be_spared`: the job could go on without it.
    """
    # A lost node sends nothing more.
    if failure.noticed_as(LauncherFailure.NODE) and in_job:
        return "lost"

    # A node that cannot run its ranks would only fail again.
    if failure.traits.dismisses_node and can_be_spared:
        return "dismissed"

    return None


def after_failure(failure: Failure, situation: Situation) -> Decision:
    """Return what follows the failure of an attempt: the first rule that applies."""
    if failure.noticed_as(LauncherFailure.IMPORT):
        return _failed("it would end the same way", failure)

    if _resize_may_be_at_fault(failure, situation):
        return UndoResize()

    if failure.for_user:
        return End(JobEnd(ExitCode.REFUSED, failure), "the same program would run into the same error")

    # The job was ending anyway.
    if situation.preempt_signal:
        return _end_as_asked(failure, situation)

    # The ranks were well until a resize or a new node asked them to save.
    if failure.noticed_as(LauncherFailure.GRACE_EXCEEDED):
        return Continue()

    if situation.shortage:
        return _end_without_nodes(situation.shortage, failure, situation)

    reason = _reason_not_to_restart(failure, situation)
    if reason:
        return _failed(reason, failure)

    return Restart(longer_timeouts=situation.reached_timeout)


def after_request(situation: Situation, final_end: End | None = None) -> Decision:
    """Return what follows when the ranks were asked to save and exit, by a signal, a resize or a new node.

    `final_end`: the one that was decided already, while ranks are being killed.
    """
    # A job that has failed has an exit code of its own, which a signal must not change.
    if final_end is not None:
        return final_end

    if not situation.preempt_signal:
        return Continue()

    # A signal may come before the first attempt. After that, training may be lost.
    if not situation.attempt.was_started or situation.can_be_resumed:
        return EndPreempted()

    if situation.attempt.save_outcome == "failed":
        return _failed("the save failed, and there is no checkpoint")

    return _failed(_reason_by_signal(situation))


def after_second_ctrl_c(situation: Situation) -> End:
    """Return how the job ends when Ctrl-C was typed twice."""
    # The exit code is that of the first signal, and it is known before the ranks are gone.
    return End(JobEnd(Preempted.code_of(situation.preempt_signal)), "Ctrl-C was typed twice")


def if_none_can_start(problem: str, situation: Situation) -> End | EndPreempted:
    """Return how the job ends when no rank runs, and no attempt can follow because of this problem."""
    failure = Failure.by_launcher(LauncherFailure.NODE, problem)
    if situation.preempt_signal:
        return _end_as_asked(failure, situation)

    return _end_without_nodes(problem, failure, situation)


def _failed(reason: str, failure: Failure | None = None) -> End:
    return End(JobEnd(ExitCode.FAILED, failure), reason)


def _end_as_asked(failure: Failure, situation: Situation) -> End | EndPreempted:
    """End a job that a signal has asked to end. If it cannot be resumed, it has failed."""
    if situation.can_be_resumed:
        return EndPreempted()

    return _failed(_reason_by_signal(situation), failure)


def _reason_by_signal(situation: Situation) -> str:
    """Return why a job that was asked to end, and cannot be resumed, is not restarted."""
    return f"the job was asked to save and exit ({situation.preempt_signal})"


def _end_without_nodes(problem: str, failure: Failure, situation: Situation) -> End:
    """End a job whose nodes cannot run another attempt. With other nodes it could go on."""
    return End(JobEnd(situation.settings.code_if_nodes_are_missing, failure), problem)


def _resize_may_be_at_fault(failure: Failure, situation: Situation) -> bool:
    """Return whether the first attempt after a resize was ended by its own error before it saved anything."""
    # A signal, or a lost node, may end any attempt. Only an error that repeats can come from the new size.
    repeats = failure.for_user or failure.likely_to_repeat
    return situation.first_after_resize and repeats and not situation.preempt_signal and not situation.attempt.has_saved


def _reason_not_to_restart(failure: Failure, situation: Situation) -> str | None:
    """Return why a restart would not help, or is not allowed; None if the job restarts."""
    # micro_batch=auto asked for this restart, and asks only a few times: each time the size is smaller.
    if failure.traits.asks_for_smaller_micro_batch:
        return None

    settings = situation.settings
    if failure.traits.hangs and settings.hang.action == "stop":
        return "hang.action is stop"

    if failure.traits.hangs and situation.attempt.any_finished:
        return "another rank has ended with code 0, so the same would most likely recur"

    if failure.likely_to_repeat and not situation.attempt.has_saved:
        return "no checkpoint has been saved since the last start, so the same error would most likely recur"

    if settings.restart.per_hour == 0:
        return "restart.per_hour is 0"

    if situation.restarts_in_a_row >= settings.restart.max_in_a_row:
        without = f"{situation.restarts_in_a_row} restarts in a row without a new checkpoint"
        return f"{without}, which is the limit (restart.max_in_a_row)"

    if situation.recent_restarts >= settings.restart.per_hour:
        return f"{situation.recent_restarts} restarts within the last hour, which is the limit"

    return None
