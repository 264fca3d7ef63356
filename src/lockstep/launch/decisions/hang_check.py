"""Ranks that stall: their stacks are collected, and if it is a hang, that is a failure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.launch.decisions.failure_handler import FailureHandler
from lockstep.launch.decisions.state import JobState
from lockstep.launch.decisions.status import ACTIVE, NODES_STACKS_S, JobStatus
from lockstep.launch.wire.messages import CollectStacks, Stacks


@dataclass
class Collection:
    """Stacks that the nodes were asked for."""

    attempt: int | None
    request: int
    deadline: float
    unanswered: set[int]  # nodes

    # The time that the ranks had to save and exit is over: they are killed whatever the stacks show.
    overdue: bool = False


class HangCheck:
    """Asks the watchdog of the current attempt, collects the stacks that it needs, and acts on its verdict."""

    def __init__(self, state: JobState, failure_handler: FailureHandler):
        self._state = state
        self._failure_handler = failure_handler

        # The number of the newest request for stacks, and what has come of it.
        self._request = 0
        self._newest: Collection | None = None

    def check(self, now: float) -> None:
        """Check whether any rank advances; called about once a second."""
        state, attempt = self._state, self._state.attempt
        # After a failure the other ranks stall. That is not a hang, and the failure will be announced soon.
        if state.status not in ACTIVE or attempt.has_failed:
            return

        # Ranks that were asked to save before any of them has ended a step may still compile for long.
        if state.status is JobStatus.SAVE_AND_EXIT and attempt.watchdog.nothing_to_save(attempt.running):
            self._failure_handler.follow_request(now)
            self._failure_handler.order_kill(now)
            return

        # Ranks that save exit together: the first one to exit sets the time that the others have.
        if self._pending is not None or attempt.save:
            return

        if attempt.watchdog.suspicion(attempt.running, now, state.restarts.hangs) is not None:
            self._collect(now)

    def _collect(self, now: float) -> Collection:
        """Ask all nodes for the stacks of their ranks. Ranks that have failed, and clean up, are killed there."""
        state = self._state
        self._request += 1
        state.order(CollectStacks, request=self._request)
        self._newest = Collection(state.attempt.number, self._request, now + NODES_STACKS_S, state.nodes_of_attempt)
        return self._newest

    @property
    def _pending(self) -> Collection | None:
        """The stacks that are awaited. Those of an attempt that is over, or has failed, are of no use any more."""
        state, newest = self._state, self._newest
        if newest is None or newest.attempt != state.attempt.number:
            return None

        return newest if state.status in ACTIVE and not state.attempt.has_failed else None

    def is_due(self, now: float) -> bool:
        """Return whether the wait for stacks is over: in time, or because the nodes that owed them are lost."""
        pending = self._pending
        if pending is None:
            return False

        return now >= pending.deadline or not pending.unanswered & self._state.members.nodes.keys()

    def add_stacks(self, node: int, message: Stacks, now: float) -> None:
        """Take the stacks of a node's ranks. When all nodes have answered, the hang can be judged."""
        # Stacks may arrive after the deadline, when the hang has been judged: after the next request, or even in the
        # next attempt.
        pending = self._pending
        if pending is None or (message.attempt, message.request) != (pending.attempt, pending.request):
            return

        self._state.attempt.watchdog.add_answers(message.stack_of, message.collectives_of)
        pending.unanswered.discard(node)

        if self.is_due(now):
            self.judge(now)

    def overdue(self, now: float) -> None:
        """Act on ranks that did not save and exit in time: find out which one holds up the others, and kill them."""
        pending = self._pending
        if pending is None:
            self._state.attempt.watchdog.forget_answers()
            pending = self._collect(now)

        pending.overdue = True
        self._state.deadline = math.inf

    def judge(self, now: float) -> None:
        """Judge the hang by the stacks that have arrived."""
        pending, state = self._pending, self._state
        assert pending is not None
        self._newest = None
        watchdog = state.attempt.watchdog

        if pending.overdue:
            self._failure_handler.handle(state.attempt.overdue_failure(), now)
            return

        # Since then, a rank may have saved and exited.
        if state.attempt.save:
            return

        # It is not a hang if some rank has advanced in the meantime or is compiling.
        if failure := watchdog.verdict(saves_may_take_long=state.status is JobStatus.SAVE_AND_EXIT):
            self._failure_handler.handle(failure, now)

        # Long before the limit is reached, the screen says where the ranks are.
        elif report := watchdog.take_stall_report():
            state.outbox.say(report)
