"""What is done about a failure: it is announced, all ranks are killed, and when they are gone the job goes on or ends.

What follows is decided in `recovery.py`. Here that decision is recorded, announced and carried out.
"""

from __future__ import annotations

from lockstep.errors import ExitCode, plural
from lockstep.launch.decisions.next_attempt import NextAttempt
from lockstep.launch.decisions.phases import ACTIVE, NODES_KILL_S, JobPhase
from lockstep.launch.decisions.preemption import Preemption
from lockstep.launch.decisions.recovery import Decision, End, EndPreempted, Restart, Situation, UndoResize
from lockstep.launch.decisions.state import JobState
from lockstep.launch.failure import Failure
from lockstep.launch.wire.messages import JobEnd, Kill


class FailureHandler:
    """Handles the failure of an attempt, from its announcement until no rank is left."""

    def __init__(self, state: JobState, preemption: Preemption, next_attempt: NextAttempt):
        self._state = state
        self._preemption = preemption
        self._next_attempt = next_attempt

    def handle(self, failure: Failure, now: float, nothing_to_save: bool = False) -> None:
        """Decide what follows, announce it with the failure, and kill all ranks. `nothing_to_save`: see `Situation`."""
        self.settle(failure, now, nothing_to_save)
        self.order_kill(now)

    # ---- the decision ----

    def settle(self, failure: Failure, now: float, nothing_to_save: bool) -> Decision:
        """Decide what follows when all ranks are gone, record it, and announce it with the failure."""
        state, recovery = self._state, self._state.recovery

        saved = state.latest_step()
        signal = self._preemption.signal
        situation = Situation(state.attempt, saved, state.settings, signal, nothing_to_save, now)

        decision = recovery.decide(failure, situation)

        match decision:
            case Restart():
                self._next_attempt.mark_restart()
                self._announce(failure, recovery.restart(decision, failure, situation))

            case UndoResize():
                self._announce(failure)
                self._undo_resize()

            case EndPreempted():
                # `NextAttempt` ends the job, since `Preemption` has a signal.
                self._announce(failure, "not restarted: the job was asked to save and exit")

            case End(code, reason):
                # If the same error would most likely recur, no command is suggested.
                would_recur = saved is None and failure.likely_to_repeat
                hint = "" if would_recur else f". {state.how_to_continue(saved)}"
                self._plan_end(failure, code, f"{reason}{hint}")

        return decision

    def end_because_imports_fail(self, failure: Failure, now: float) -> None:
        """End the job, because the imports of its program fail. The next attempt would import the same."""
        self._plan_end(failure, ExitCode.FAILED, "it would end the same way")

        # In JOIN there are no ranks, and `NextAttempt.tick` ends the job.
        if self._state.phase is not JobPhase.JOIN:
            self.order_kill(now)

    def _plan_end(self, failure: Failure, code: ExitCode, reason: str) -> None:
        """End the job as failed once its ranks are gone, and announce why it is not restarted."""
        self._next_attempt.plan_end(JobEnd(code, failure))
        self._announce(failure, f"not restarted: {reason}")

    def _undo_resize(self) -> None:
        """Return to the size before the last resize, and say so."""
        state = self._state
        failed = state.cluster.world_size
        state.recovery.undo_resize()

        ranks = state.cluster.world_size
        state.outbox.say(f"not resized to {plural(failed, 'rank')}: continuing with {plural(ranks, 'rank')}")
        state.outbox.log_resize(failed, ranks)

    def _announce(self, failure: Failure, what_follows: str = "") -> None:
        """Announce a failure of the current attempt."""
        attempt = self._state.attempt
        # Outside these phases no rank runs that the failure could end.
        others = attempt.count_ended_by(failure) if self._state.phase in ACTIVE else 0
        self._state.outbox.announce_failure(failure, attempt.number, others, what_follows)

    # ---- the end of all ranks ----

    def order_kill(self, now: float) -> None:
        """Order every node to kill its ranks; `continue_if_gone` goes on when they are gone."""
        self._state.enter(JobPhase.KILL, now + NODES_KILL_S, self._state.nodes_of_attempt)
        self._state.order(Kill)
        self.continue_if_gone(now)

    def continue_if_gone(self, now: float) -> None:
        """Go on, if the ranks were killed and the last node has said that they are gone."""
        if self._state.phase is JobPhase.KILL and not self._state.unanswered:
            self._next_attempt.wait_for_nodes(now)
