"""Between two attempts, while no rank runs: the job waits for its nodes, then starts the next attempt, or ends."""

from __future__ import annotations

from lockstep.errors import plural
from lockstep.launch.decisions.attempt import Attempt
from lockstep.launch.decisions.commands import StartAttempt
from lockstep.launch.decisions.phases import JOIN_S, NODES_KILL_S, START_S, JobPhase
from lockstep.launch.decisions.preemption import Preemption
from lockstep.launch.decisions.state import JobState
from lockstep.launch.failure import Failure, LauncherFailure
from lockstep.launch.hangs.watchdog import Watchdog
from lockstep.launch.job import COORDINATOR
from lockstep.launch.wire.messages import JobEnd

# How long the job waits before it says which nodes are missing, and between two lines about that.
SAY_MISSING_S = 3.0


class NextAttempt:
    """Starts the next attempt when its nodes are there, unless the job ends.

    `not_before`: until then nothing starts, and the job does not end. After a takeover the old rank 0 may still be
    alive.
    """

    def __init__(self, state: JobState, preemption: Preemption, now: float, not_before: float):
        self._state = state
        self._preemption = preemption
        self._not_before = not_before

        # How the job ends instead, once all ranks are gone. None if another attempt follows, or if the job ends as
        # preempted; a second Ctrl-C sets it at once.
        self._planned_end: JobEnd | None = None

        # Whether this attempt is logged as a restart when it starts; its size is not known before.
        self._is_restart = False

        # How many nodes were missing when that was last said, and when it may be said next.
        self._said_missing = 0
        self._say_missing_at = now + SAY_MISSING_S

    # ---- what was decided before the ranks are gone ----

    def plan_end(self, ending: JobEnd) -> None:
        """End the job in this way, instead of another attempt."""
        self._planned_end = ending

    def mark_restart(self) -> None:
        """Log the next attempt as a restart."""
        self._is_restart = True

    # ---- waiting for nodes ----

    def wait_for_nodes(self, now: float) -> None:
        """Enter JOIN after an attempt: end the job if that is planned or too few nodes are left, or start the next one.

        If more nodes may join, the next attempt starts a little later (`Cluster.ready`).
        """
        self._state.enter(JobPhase.JOIN, now + JOIN_S)
        self._end_or_start(now)
        if self._state.phase is JobPhase.JOIN:
            self.end_if_too_few()

    def tick(self, now: float) -> None:
        """Let time pass in JOIN."""
        # Until then the ranks of a lost coordinator may still be alive, and write to the run folder.
        if now >= self._not_before:
            self._end_or_start(now)

        # The job may have left the phase.
        missing = self._state.cluster.missing
        if self._state.phase is JobPhase.JOIN and now >= self._say_missing_at and missing != self._said_missing:
            self.say_missing(now)

    def say_missing(self, now: float) -> None:
        """Say how many nodes are missing, if any are, and how long the job waits for them."""
        cluster = self._state.cluster
        self._said_missing = cluster.missing
        self._say_missing_at = now + SAY_MISSING_S

        if cluster.missing:
            left = self._state.deadline - now
            time_left = f"{left / 60:.0f} minutes" if left >= 90 else f"{left:.0f} s"
            limit = f"of {cluster.bounds.least}; giving up after {time_left}"

            where = self._state.job.join
            self._state.outbox.say(f"waiting for {plural(cluster.missing, 'more node')} at {where} ({limit})")

    # ---- the end of the job ----

    def end_if_too_few(self) -> None:
        """End the job if nodes are missing after an attempt. A restart may have been announced before they left."""
        shortage = self._state.cluster.shortage
        if shortage:
            self._end_without_nodes(f"not restarted: {shortage}.", shortage)

    def give_up(self) -> None:
        """End the job, because too few nodes came in time."""
        cluster = self._state.cluster
        problem = f"only {plural(len(cluster.nodes), 'node')} came within {JOIN_S:.0f} s"
        self._end_without_nodes(f"{problem}; {cluster.bounds.least} are needed.", problem)

    def end_with_ranks_left(self) -> None:
        """End the job, because killed ranks on this machine do not die."""
        if not self._end_if_decided():
            problem = f"killed ranks on this machine did not end within {NODES_KILL_S:.0f} s"
            self._end_without_nodes(f"not restarted: {problem}.", problem)

    def _end_without_nodes(self, text: str, problem: str) -> None:
        """End the job with a line on the screens: `text`, and how to continue. `problem` goes into the failure."""
        state = self._state
        state.outbox.say(f"{text} {state.how_to_continue(state.latest_step())}")
        state.end(JobEnd(state.settings.code_if_nodes_are_missing, Failure.by_launcher(LauncherFailure.NODE, problem)))

    def _end_if_decided(self) -> bool:
        """End the job if that was decided before the ranks were gone. Return whether it was."""
        # In this order: a planned end has an exit code of its own, which a signal must not change.
        if self._planned_end is not None:
            self._state.end(self._planned_end)
        elif self._preemption.signal is not None:
            self._preemption.end_job()

        return self._state.phase is JobPhase.OVER

    # ---- the start of an attempt ----

    def _end_or_start(self, now: float) -> None:
        """End the job if that is decided already; otherwise start the next attempt if the nodes are there."""
        if not self._end_if_decided() and self._state.cluster.ready(now):
            self._start(now)

    def _start(self, now: float) -> None:
        """Start an attempt with the nodes that are there, in the order of their numbers."""
        state, cluster = self._state, self._state.cluster
        counts = dict(sorted(cluster.wanted.items()))
        hosts = {node: cluster.nodes[node].host for node in counts}

        # A place where earlier attempts seemed to hang gets more time.
        watchdog = Watchdog(state.settings.hang, state.recovery.hang_places)

        number = state.attempt.next_number

        # The first attempt may go back to an earlier checkpoint. When it has, that one is the newest, and it must not
        # look as if the attempt had saved it.
        goes_back_to = state.job.goes_back_to if number == 0 else None
        started_from = state.latest_step() if goes_back_to is None else goes_back_to

        state.enter(JobPhase.RUN)
        state.attempt = attempt = Attempt(number, counts, hosts, started_from, watchdog)

        # The coordinating node starts its ranks at once. The others confirm that they do with their next heartbeat.
        attempt.unconfirmed = counts.keys() - {COORDINATOR}
        attempt.confirm_by = now + START_S

        # Only now is it known how many ranks restart.
        if self._is_restart:
            self._is_restart = False
            state.outbox.log("restart", attempt=number, ranks=cluster.world_size, step=attempt.started_from)

        state.outbox.put(StartAttempt(number, counts))
