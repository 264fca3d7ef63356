"""Ranks that stall: their stacks are collected, and if it is a hang, that is a failure."""

from __future__ import annotations

from lockstep.launch.decisions.failure_handler import FailureHandler
from lockstep.launch.decisions.state import JobState
from lockstep.launch.decisions.status import NODES_STACKS_S, JobStatus
from lockstep.launch.wire.messages import CollectStacks, Stacks


class HangCheck:
    """Asks the watchdog of the current attempt, collects the stacks that it needs, and acts on its verdict."""

    def __init__(self, state: JobState, failure_handler: FailureHandler):
        self._state = state
        self._failure_handler = failure_handler

        # The number of the newest request for stacks.
        self._request = 0

    def check(self, now: float) -> None:
        """Check whether any rank advances; called about once a second."""
        # After a failure the other ranks stall. That is not a hang, and the failure will be announced soon.
        if self._state.attempt.has_failed:
            return

        match self._state.status:
            case JobStatus.RUN:
                self._collect_stacks_on_suspicion(now)
            case JobStatus.SAVE_AND_EXIT:
                self._kill_if_nothing_to_save(now)

    def _collect_stacks_on_suspicion(self, now: float) -> None:
        """Collect the stacks of all ranks if the job seems to hang."""
        state = self._state
        if state.attempt.watchdog.suspicion(state.attempt.running, now) is not None:
            state.enter(JobStatus.COLLECT_STACKS, now + NODES_STACKS_S, state.nodes_of_attempt)
            self._request += 1
            state.order(CollectStacks, request=self._request)

    def _kill_if_nothing_to_save(self, now: float) -> None:
        """Kill ranks that were asked to save before any of them has ended a step: they may still compile for long."""
        attempt = self._state.attempt
        if attempt.watchdog.nothing_to_save(attempt.running):
            self._failure_handler.follow_request(now)
            self._failure_handler.order_kill(now)

    def add_stacks(self, node: int, message: Stacks, now: float) -> None:
        """Take the stacks of a node's ranks. When all nodes have answered, the hang can be judged."""
        state = self._state
        # Stacks may arrive after the deadline, when the hang has been judged: after the next request, or even in the
        # next attempt.
        awaited = message.attempt == state.attempt.number and message.request == self._request
        if not awaited or state.status is not JobStatus.COLLECT_STACKS:
            return

        state.attempt.watchdog.add_answers(message.stack_of, message.collectives_of)
        state.unanswered.discard(node)

        if not state.unanswered:
            self.judge(now)

    def judge(self, now: float) -> None:
        """Act on the verdict, with the stacks that have arrived."""
        watchdog = self._state.attempt.watchdog
        self._state.enter(JobStatus.RUN)

        # It is not a hang if some rank has advanced in the meantime or is compiling.
        if failure := watchdog.verdict():
            self._failure_handler.handle(failure, now)

        # Long before the limit is reached, the screen says where the ranks are.
        elif report := watchdog.take_stall_report():
            self._state.outbox.say(report)
