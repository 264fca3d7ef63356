"""Ranks that stand still: their stacks are collected, and a hang is a failure."""

from __future__ import annotations

from lockstep.launch.decisions.failure_handler import FailureHandler
from lockstep.launch.decisions.phases import NODES_STACKS_S, JobPhase
from lockstep.launch.decisions.state import JobState
from lockstep.launch.wire.messages import CollectStacks, Stacks


class HangCheck:
    """Asks the watchdog of the current attempt, collects the stacks that it needs, and acts on its verdict."""

    def __init__(self, state: JobState, failure_handler: FailureHandler):
        self._state = state
        self._failure_handler = failure_handler

    def check(self, now: float) -> None:
        """Check whether any rank advances; called about once a second."""
        # After a failure the other ranks stand still. That is not a hang, and the failure will be announced soon.
        if self._state.attempt.has_failed:
            return

        match self._state.phase:
            case JobPhase.RUN:
                self._collect_stacks_on_suspicion(now)
            case JobPhase.PREEMPT:
                self._kill_ranks_that_will_not_save(now)

    def _collect_stacks_on_suspicion(self, now: float) -> None:
        """Collect the stacks of all ranks if the job seems to stand still."""
        state = self._state
        if state.attempt.watchdog.suspicion(state.attempt.running, now) is not None:
            state.enter(JobPhase.COLLECT_STACKS, now + NODES_STACKS_S, state.nodes_of_attempt)
            state.order(CollectStacks)

    def _kill_ranks_that_will_not_save(self, now: float) -> None:
        """Handle ranks that were asked to save and do not move: they will not save either."""
        attempt = self._state.attempt
        stuck = attempt.watchdog.ranks_standing_still(attempt.running, attempt.preempted_at, now)
        if not stuck:
            return

        # Before the first step there is nothing to save.
        trained = any(view.steps_here for view in stuck)
        self._failure_handler.handle(attempt.standstill_failure(stuck), now, nothing_to_save=not trained)

    def add_stacks(self, node: int, message: Stacks, now: float) -> None:
        """Take the stacks of a node's ranks. When all nodes have answered, the hang can be judged."""
        state = self._state
        # Stacks may arrive after the deadline, when the hang is judged, or even in the next attempt.
        if message.attempt != state.attempt.number or state.phase is not JobPhase.COLLECT_STACKS:
            return

        state.attempt.watchdog.add_answers(message.stack_of, message.collectives_of)
        state.unanswered.discard(node)

        if not state.unanswered:
            self.judge(now)

    def judge(self, now: float) -> None:
        """Act on the verdict, with the stacks that have arrived."""
        watchdog = self._state.attempt.watchdog
        self._state.enter(JobPhase.RUN)

        # It is not a hang if some rank has advanced in the meantime or is compiling.
        if failure := watchdog.verdict():
            self._failure_handler.handle(failure, now)

        # Long before the limit is reached, the screen says where the ranks are.
        elif remark := watchdog.take_remark():
            self._state.outbox.say(remark)
