"""Waits for the nodes of a job while no rank runs, then starts the next attempt, or ends the job."""

from __future__ import annotations

import math

from lockstep.errors import plural
from lockstep.launch.decisions.attempt import Attempt, Attempts
from lockstep.launch.decisions.commands import Outbox, StartAttempt
from lockstep.launch.decisions.job_facts import JobFacts
from lockstep.launch.decisions.job_nodes import JobNodes
from lockstep.launch.decisions.recovery import (
    AttemptFacts,
    Decision,
    End,
    EndPreempted,
    Restart,
    Situation,
    if_none_can_start,
)
from lockstep.launch.decisions.save_requests import SaveRequests
from lockstep.launch.decisions.status import CurrentStatus, JobStatus
from lockstep.launch.hangs.watchdog import Watchdog
from lockstep.launch.job import COORDINATOR
from lockstep.launch.restarts import Restarts
from lockstep.launch.times import JOIN_S, START_S
from lockstep.launch.wire.messages import JobEnd

# How long the job waits before it announces how many nodes are missing, and between two lines about that.
ANNOUNCE_MISSING_S = 3.0


class NextAttempt:
    """Starts the next attempt when its nodes are there, unless the job ends.

    `not_before`: until then nothing starts, and the job does not end. After a takeover the rank 0 of the lost
    coordinator may still be alive.
    """

    def __init__(
        self,
        facts: JobFacts,
        status: CurrentStatus,
        nodes: JobNodes,
        attempts: Attempts,
        restarts: Restarts,
        outbox: Outbox,
        save_requests: SaveRequests,
        now: float,
        not_before: float,
    ):
        self._facts = facts
        self._status = status
        self._nodes = nodes
        self._attempts = attempts
        self._restarts = restarts
        self._outbox = outbox
        self._save_requests = save_requests
        self._not_before = not_before

        # What follows when all ranks are gone. None before the first attempt, and while nothing has happened.
        self.decision: Decision | None = None

        # How many nodes were missing when that was last announced, and when it may be announced next.
        self._announced_missing = 0
        self._announce_missing_at = now + ANNOUNCE_MISSING_S

    # ---- the decision ----

    def situation(self, now: float) -> Situation:
        """Return the facts on which a decision depends."""
        attempt, newest_step = self._attempts.newest, self._facts.newest_step

        return Situation(
            settings=self._facts.settings,
            newest_step=newest_step,
            attempt=attempt.facts(newest_step) if attempt is not None else AttemptFacts(),
            recent_restarts=self._restarts.recent(now),
            restarts_in_a_row=self._restarts.in_a_row,
            shortage=self._shortage,
            preempt_signal=self._save_requests.preempt_signal,
            first_after_resize=self._save_requests.first_after_resize,
        )

    @property
    def _shortage(self) -> str | None:
        """How many nodes are missing for another attempt, in words; None if there are enough."""
        # Until this coordinator has started an attempt, also after a takeover, the other nodes have yet to join.
        return self._nodes.shortage if self._attempts.newest is not None else None

    def note_decision(self, decision: Decision) -> None:
        """Note what follows when all ranks are gone: an answer of `recovery.py`."""
        self.decision = decision

    @property
    def decided_end(self) -> End | EndPreempted | None:
        """How the job ends when all ranks are gone; None if no end is decided."""
        return self.decision if isinstance(self.decision, End | EndPreempted) else None

    @property
    def final_end(self) -> End | None:
        """The decided end, if it has an exit code of its own, which no later signal changes; None otherwise.

        A job that ends as preempted has none: its code is that of the signal.
        """
        return self.decision if isinstance(self.decision, End) else None

    # ---- waiting for nodes ----

    def attempt_is_over(self, now: float) -> None:
        """Enter JOIN after an attempt: end the job if that is decided, or start the next one.

        If more nodes may join, the next attempt starts a little later (`JobNodes.ready_at`).
        """
        self._status.enter(JobStatus.JOIN, now + JOIN_S)
        self._nodes.begin_to_settle(now)
        self._end_or_start_if_due(now)
        self.end_if_too_few(now)

    @property
    def due(self) -> float:
        """When the next attempt starts, or the job ends, if nothing happens before; infinite if ranks run."""
        if self._status.current is not JobStatus.JOIN:
            return math.inf

        if self.decided_end is not None:
            return self._not_before

        # At the deadline the job no longer waits for more nodes than it needs.
        return max(self._not_before, min(self._nodes.ready_at, self._status.deadline))

    def tick(self, now: float) -> None:
        """Let time pass in JOIN."""
        self._end_or_start_if_due(now)

        # The job may have started or ended.
        is_news = now >= self._announce_missing_at and self._nodes.missing != self._announced_missing
        if self._status.current is JobStatus.JOIN and is_news:
            self.announce_missing(now)

    def _end_or_start_if_due(self, now: float) -> None:
        """End the job if that is decided already; otherwise start the next attempt if the nodes are there."""
        if now < self.due or self._end_if_decided():
            return

        # No more nodes are waited for, and those that are there are either enough or too few.
        nodes = self._nodes
        if nodes.missing:
            came = f"only {plural(len(nodes.joined), 'node')} came within {JOIN_S:.0f} s"
            self.end_without_attempt(f"{came}, and {nodes.bounds.least} are needed", now)
        else:
            self._start(now)

    def _start(self, now: float) -> None:
        """Start an attempt with the nodes that are there, in the order of their numbers."""
        nodes, last_number = self._nodes, self._attempts.last_number
        counts = dict(sorted(nodes.ranks_per_node.items()))
        hosts = {node: nodes.joined[node].host for node in counts}

        number = 0 if last_number is None else last_number + 1
        attempt = Attempt(number, counts, hosts, self._facts.newest_step, Watchdog(self._facts.settings.hang))
        self._status.enter(JobStatus.RUN)
        self._attempts.begin(attempt)

        # The coordinating node starts its ranks at once. The others confirm that they do with their next heartbeat.
        attempt.awaiting_start = counts.keys() - {COORDINATOR}
        attempt.confirm_by = now + START_S

        # The number of ranks that restart is known only now.
        if isinstance(self.decision, Restart):
            self._outbox.record_event("restart", attempt=number, ranks=nodes.world_size, step=attempt.started_from)

        self.decision = None
        self._outbox.put(StartAttempt(number, {node: attempt.ranks_on(node) for node in counts}))

    def announce_missing(self, now: float) -> None:
        """Announce how many nodes are missing, if any are, and how long the job waits for them."""
        missing = self._nodes.missing
        self._announced_missing = missing
        self._announce_missing_at = now + ANNOUNCE_MISSING_S

        if missing:
            left = self._status.deadline - now
            time_left = f"{left / 60:.0f} minutes" if left >= 90 else f"{left:.0f} s"
            limit = f"of {self._nodes.bounds.least}; giving up after {time_left}"

            where = self._facts.job.join
            self._outbox.announce(f"waiting for {plural(missing, 'more node')} at {where} ({limit})")

    # ---- the end of the job ----

    def end_if_too_few(self, now: float) -> None:
        """End the job if nodes are missing after an attempt. A restart may have been announced before they left."""
        shortage = self._shortage
        if self._status.current is JobStatus.JOIN and shortage:
            self.end_without_attempt(shortage, now)

    def end_without_attempt(self, problem: str, now: float) -> None:
        """End the job while no rank runs, because no attempt can follow. An end that was decided before stays."""
        if self.decided_end is None:
            self.note_decision(if_none_can_start(problem, self.situation(now)))
            again = "started" if self._attempts.last_number is None else "restarted"
            self._outbox.announce(f"not {again}: {problem}. {self._facts.how_to_resume}")

        self._end_if_decided()

    def _end_if_decided(self) -> bool:
        """End the job if that was decided before the ranks were gone. Return whether it was."""
        match self.decision:
            case End(ending=ending):
                self.end_job(ending)
                return True

            case EndPreempted():
                self.end_job(self._save_requests.announce_end())
                return True

            case _:
                return False

    def end_job(self, ending: JobEnd) -> None:
        """End the job. No rank runs any more."""
        self._status.enter(JobStatus.OVER)
        self._outbox.put(ending)
