"""Waits for the nodes of a job while no rank runs, then starts the next attempt, or ends the job."""

from __future__ import annotations

import math

from lockstep.errors import plural
from lockstep.launch.decisions.attempt import Attempt
from lockstep.launch.decisions.recovery import End, EndPreempted, Restart, if_none_can_start
from lockstep.launch.decisions.save_requests import SaveRequests
from lockstep.launch.decisions.state import JobState
from lockstep.launch.decisions.status import JobStatus
from lockstep.launch.hangs.watchdog import Watchdog
from lockstep.launch.job import COORDINATOR
from lockstep.launch.times import JOIN_S, START_S

# How long the job waits before it announces how many nodes are missing, and between two lines about that.
ANNOUNCE_MISSING_S = 3.0


class NextAttempt:
    """Starts the next attempt when its nodes are there, unless the job ends.

    `not_before`: until then nothing starts, and the job does not end. After a takeover the rank 0 of the lost
    coordinator may still be alive.
    """

    def __init__(self, state: JobState, save_requests: SaveRequests, now: float, not_before: float):
        self._state = state
        self._save_requests = save_requests
        self._not_before = not_before

        # How many nodes were missing when that was last announced, and when it may be announced next.
        self._announced_missing = 0
        self._announce_missing_at = now + ANNOUNCE_MISSING_S

    # ---- waiting for nodes ----

    def wait_for_nodes(self, now: float) -> None:
        """Enter JOIN after an attempt: end the job if that is decided, or start the next one.

        If more nodes may join, the next attempt starts a little later (`JobNodes.ready_at`).
        """
        self._state.enter(JobStatus.JOIN, now + JOIN_S)
        self._state.nodes.begin_to_settle(now)
        self._end_or_start_if_due(now)
        self.end_if_too_few(now)

    @property
    def due(self) -> float:
        """When the next attempt starts, or the job ends, if nothing happens before; infinite if ranks run."""
        if self._state.status is not JobStatus.JOIN:
            return math.inf

        # At the deadline the job no longer waits for more nodes than it needs.
        ends = self._state.end_is_decided
        return max(self._not_before, -math.inf if ends else min(self._state.nodes.ready_at, self._state.deadline))

    def tick(self, now: float) -> None:
        """Let time pass in JOIN."""
        self._end_or_start_if_due(now)

        # The job may have started or ended.
        missing = self._state.nodes.missing
        is_news = now >= self._announce_missing_at and missing != self._announced_missing
        if self._state.status is JobStatus.JOIN and is_news:
            self.announce_missing(now)

    def announce_missing(self, now: float) -> None:
        """Announce how many nodes are missing, if any are, and how long the job waits for them."""
        nodes = self._state.nodes
        self._announced_missing = nodes.missing
        self._announce_missing_at = now + ANNOUNCE_MISSING_S

        if nodes.missing:
            left = self._state.deadline - now
            time_left = f"{left / 60:.0f} minutes" if left >= 90 else f"{left:.0f} s"
            limit = f"of {nodes.bounds.least}; giving up after {time_left}"

            where = self._state.job.join
            self._state.outbox.announce(f"waiting for {plural(nodes.missing, 'more node')} at {where} ({limit})")

    # ---- the end of the job ----

    def end_if_too_few(self, now: float) -> None:
        """End the job if nodes are missing after an attempt. A restart may have been announced before they left."""
        shortage = self._state.shortage
        if self._state.status is JobStatus.JOIN and shortage:
            self.end_without_attempt(shortage, now)

    def end_without_attempt(self, problem: str, now: float) -> None:
        """End the job while no rank runs, because no attempt can follow. An end that was decided before stays."""
        state = self._state
        if not state.end_is_decided:
            state.decided = if_none_can_start(problem, state.situation(now))
            again = "started" if state.last_attempt_number is None else "restarted"
            state.outbox.announce(f"not {again}: {problem}. {state.how_to_resume}")

        self._end_if_decided()

    def _end_if_decided(self) -> bool:
        """End the job if that was decided before the ranks were gone. Return whether it was."""
        match self._state.decided:
            case End(ending=ending):
                self._state.end(ending)
                return True

            case EndPreempted():
                self._save_requests.end_job()
                return True

            case _:
                return False

    # ---- the start of an attempt ----

    def _end_or_start_if_due(self, now: float) -> None:
        """End the job if that is decided already; otherwise start the next attempt if the nodes are there."""
        if now < self.due or self._end_if_decided():
            return

        # The wait is over: for more nodes than the job needs, or for those that it needs.
        nodes = self._state.nodes
        if not nodes.missing:
            self._start(now)
            return

        came = f"only {plural(len(nodes.joined), 'node')} came within {JOIN_S:.0f} s"
        self.end_without_attempt(f"{came}, and {nodes.bounds.least} are needed", now)

    def _start(self, now: float) -> None:
        """Start an attempt with the nodes that are there, in the order of their numbers."""
        state, nodes = self._state, self._state.nodes
        counts = dict(sorted(nodes.ranks_per_node.items()))
        hosts = {node: nodes.joined[node].host for node in counts}

        watchdog = Watchdog(state.settings.hang)
        number = 0 if state.last_attempt_number is None else state.last_attempt_number + 1
        state.enter(JobStatus.RUN)
        state.last_attempt_number = number
        state.attempt = attempt = Attempt(number, counts, hosts, state.checkpoints.newest_step, watchdog)

        # The coordinating node starts its ranks at once. The others confirm that they do with their next heartbeat.
        attempt.awaiting_start = counts.keys() - {COORDINATOR}
        attempt.confirm_by = now + START_S

        # The number of ranks that restart is known only now.
        if isinstance(state.decided, Restart):
            state.outbox.record_event("restart", attempt=number, ranks=nodes.world_size, step=attempt.started_from)

        state.decided = None
        state.outbox.put(attempt.start_command)
