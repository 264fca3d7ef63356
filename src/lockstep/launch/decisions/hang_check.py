"""Finds ranks that stall: it has their stacks collected, and if they hang, that is a failure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lockstep.launch.decisions.attempt import Attempt, Attempts
from lockstep.launch.decisions.attempt_end import AttemptEnd
from lockstep.launch.decisions.commands import Outbox
from lockstep.launch.decisions.job_facts import JobFacts
from lockstep.launch.failure import Failure, LauncherFailure
from lockstep.launch.hangs.suspicion import Suspicion
from lockstep.launch.hangs.watchdog import Answers
from lockstep.launch.restarts import Restarts
from lockstep.launch.times import LOST_AFTER_S, OTHER_SAVES_S
from lockstep.launch.wire.messages import CollectStacks, Stacks


@dataclass
class StackRequest:
    """A request to all nodes for the stacks of their ranks."""

    attempt_number: int
    number: int
    deadline: float
    awaited: set[int]  # the nodes that have not answered
    suspicion: Suspicion | None  # None if the ranks do not seem to hang, but did not save and exit in time
    answers: Answers = field(default_factory=Answers)

    # The ranks did not save and exit in time: they are killed, whatever the stacks show.
    kills_anyway: bool = False


class HangCheck:
    """Asks the watchdog of the current attempt, collects the stacks that it needs, and acts on its verdict."""

    def __init__(
        self, facts: JobFacts, attempts: Attempts, restarts: Restarts, outbox: Outbox, attempt_end: AttemptEnd
    ):
        self._facts = facts
        self._attempts = attempts
        self._restarts = restarts
        self._outbox = outbox
        self._attempt_end = attempt_end

        # How many requests for stacks were made, and the last one until it is judged.
        self._requests = 0
        self._stack_request: StackRequest | None = None

    def check(self, now: float) -> None:
        """Check whether any rank advances; called about once a second."""
        # After a failure the other ranks stall. That is not a hang, and the failure will be announced soon.
        attempt = self._attempts.healthy
        if attempt is None:
            return

        # Ranks that save exit together: the first one to exit sets the time that the others have.
        if self._pending is not None or attempt.save_outcome:
            return

        suspicion = attempt.watchdog.find_suspicion(attempt.running_ranks, now, self._restarts.timeouts_reached)
        if suspicion is not None:
            self._request_stacks(attempt, suspicion, now)

    # ---- stacks ----

    def _request_stacks(self, attempt: Attempt, suspicion: Suspicion | None, now: float) -> StackRequest:
        """Ask all nodes for the stacks of their ranks. Ranks that have failed, and clean up, are killed there."""
        self._requests += 1
        nodes = self._attempts.nodes
        self._outbox.send(nodes, CollectStacks(attempt.number, self._requests))

        deadline = now + LOST_AFTER_S
        request = StackRequest(attempt.number, self._requests, deadline, nodes, suspicion)
        self._stack_request = request
        return request

    @property
    def _pending(self) -> StackRequest | None:
        """The request that is being answered; None if there is none, or if it is stale."""
        # Stale if its attempt is over or a rank has failed.
        request, attempt = self._stack_request, self._attempts.healthy
        if request is None or attempt is None or request.attempt_number != attempt.number:
            return None

        return request

    @property
    def due(self) -> float:
        """When the wait for stacks is over: at once if all nodes have answered or are lost; infinite without a wait."""
        pending = self._pending
        if pending is None:
            return math.inf

        return pending.deadline if pending.awaited & self._attempts.nodes else -math.inf

    def add_stacks(self, node: int, message: Stacks, now: float) -> None:
        """Add the stacks of a node's ranks. When all nodes have answered, the hang can be judged."""
        # Stacks that come after their request was judged are dropped.
        pending = self._pending
        if pending is None:
            return

        if (message.attempt, message.request) == (pending.attempt_number, pending.number):
            pending.answers.stacks |= message.stack_of
            pending.answers.collectives |= message.collectives_of
            pending.awaited.discard(node)
            if now >= self.due:
                self.judge(now)

    # ---- what follows ----

    def grace_is_over(self, now: float) -> None:
        """Kill ranks that did not save and exit in time, as soon as their stacks show which one holds up the others."""
        attempt, request = self._attempts.active, self._pending
        assert attempt is not None

        # Stacks may be on their way already, because the ranks seemed to hang.
        if request is None:
            request = self._request_stacks(attempt, None, now)

        # `judge` has the ranks killed, at the deadline of the request at the latest.
        request.kills_anyway = True

    def judge(self, now: float) -> None:
        """Judge the hang by the stacks that have arrived."""
        pending, attempt = self._pending, self._attempts.newest
        assert pending is not None
        assert attempt is not None
        self._stack_request = None

        if pending.kills_anyway:
            self._attempt_end.handle_failure(self._grace_exceeded(attempt, pending.answers), now)
            return

        # Since the request, a rank may have saved and exited.
        if attempt.save_outcome:
            return

        # The ranks do not hang if one of them has advanced in the meantime, or is compiling.
        suspicion, watchdog = pending.suspicion, attempt.watchdog
        assert suspicion is not None
        saves = self._attempts.asked_to_save
        failure = watchdog.verdict(suspicion, pending.answers, saves_may_take_long=saves)

        # Slow work may reach a timeout as well. It is no deadlock, and no rank of it is suspended or gone.
        if failure is not None:
            timed_out = failure.noticed_as(LauncherFailure.HANG) and suspicion.kind == "timeout"
            self._attempt_end.handle_failure(failure, now, reached_timeout=timed_out)
            return

        # Long before a timeout is reached, the screen says where the ranks are.
        report = watchdog.take_stall_report(suspicion, pending.answers)
        if report:
            self._outbox.announce(report)

    def _grace_exceeded(self, attempt: Attempt, answers: Answers) -> Failure:
        """Return the failure of the ranks that did not save and exit in time."""
        within = f"{self._facts.settings.restart.grace:g} s (restart.grace)"
        if attempt.save_outcome:
            within = f"{OTHER_SAVES_S:.0f} s after the first"

        hosts = {rank: attempt.host_of(rank) for rank in attempt.running_ranks}
        return attempt.watchdog.grace_exceeded(hosts, within, answers)
