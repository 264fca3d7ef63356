"""The decisions of a job: when ranks are started, on which nodes, and what follows when something happens.

The coordinator tells `JobStateMachine` what happens, and carries out the commands that it issues. Nothing here starts
a process, waits, or reads the disk. An attempt is a set of ranks that live and die together. After a failure all of
them are killed, and a new attempt resumes from the newest checkpoint, unless there is a reason not to.

`status.py` has a table of what may follow each status of the job. Each part of the state machine looks after the job
while it has some status, and gets what it reads or changes of the job's state:

    NextAttempt     JOIN: waits for nodes, starts the next attempt, or ends the job.
                    Changes the attempts, and what was decided about the next one.
    SaveRequests    SAVE_AND_EXIT: asks the ranks to save and exit, for a signal, a resize or a new node.
                    Changes the signal that preempts the job, and how many ranks each node runs.
    RankExits       RUN, SAVE_AND_EXIT: waits for the exit of the rank that failed first, or for all of them.
                    Changes the exits of the attempt.
    HangCheck       RUN, SAVE_AND_EXIT: finds ranks that stall, and the one that the others wait for.
    AttemptEnd      RUN, SAVE_AND_EXIT, KILL: asks `recovery.py` what follows a failure or a request, announces it, has
                    all ranks killed, and waits until they are gone. Counts restarts, and removes lost nodes.

What comes from outside, `JobStateMachine` notes itself: facts, nodes that join, and heartbeats.

A node that takes over from a lost coordinator begins in JOIN, with the last `CoordinatorState` that it received.
"""

from __future__ import annotations

from typing import assert_never

from lockstep.errors import plural
from lockstep.launch.decisions.attempt import Attempts
from lockstep.launch.decisions.attempt_end import AttemptEnd
from lockstep.launch.decisions.commands import Command, Outbox
from lockstep.launch.decisions.hang_check import HangCheck
from lockstep.launch.decisions.job_facts import JobFacts
from lockstep.launch.decisions.job_nodes import JobNodes, Node
from lockstep.launch.decisions.next_attempt import NextAttempt
from lockstep.launch.decisions.rank_exits import RankExits
from lockstep.launch.decisions.recovery import End, Restart
from lockstep.launch.decisions.save_requests import SaveRequests
from lockstep.launch.decisions.status import CurrentStatus, JobStatus
from lockstep.launch.failure import Failure, LauncherFailure
from lockstep.launch.job import COORDINATOR, Job, LauncherSettings
from lockstep.launch.times import FENCE_S, JOIN_S, NODES_KILL_S, START_S
from lockstep.launch.wire.messages import (
    CoordinatorState,
    NodeFailed,
    NodeHeartbeat,
    RankExited,
    RanksGone,
    SettingsRead,
    SignalReceived,
    Stacks,
    ToCoordinator,
    ranges,
)
from lockstep.run_folder.checkpoint_facts import CheckpointFacts
from lockstep.run_folder.names import LOGS


class JobStateMachine:
    """The decisions of a job.

    The public methods are called when something has happened, and issue commands; `take_commands` returns them.
    `now` is always the time of a monotonic clock. `inherited` is the last state of a lost coordinator.
    """

    def __init__(self, job: Job, checkpoints: CheckpointFacts, now: float, inherited: CoordinatorState | None = None):
        # A job without a predecessor starts from an empty state, at once.
        last = inherited or CoordinatorState([])
        not_before = now if inherited is None else now + FENCE_S
        ahead = now - last.clock

        # The state of the job. The coordinator reads it; only the methods of the state machine change it.
        self.facts = facts = JobFacts(job, LauncherSettings(**last.settings), checkpoints)
        self.status = status = CurrentStatus(deadline=now + JOIN_S)
        self.nodes = nodes = JobNodes(job.nnodes, now, last.dismissals.shift_clock(ahead))
        self.attempts = attempts = Attempts(status, nodes, last.attempt)
        self.restarts = restarts = last.restarts.shift_clock(ahead)
        self._outbox = outbox = Outbox(job.run_dir / LOGS)

        # The parts. Each gets what it reads or changes of the state, then the parts before it that it calls.
        self._save_requests = save_requests = SaveRequests(facts, status, nodes, attempts, outbox, last.preempt_signal)
        self._next_attempt = next_attempt = NextAttempt(
            facts, status, nodes, attempts, restarts, outbox, save_requests, now, not_before
        )
        self._attempt_end = attempt_end = AttemptEnd(
            facts, status, nodes, attempts, restarts, outbox, save_requests, next_attempt
        )
        self._rank_exits = RankExits(facts, nodes, attempts, save_requests, attempt_end)
        self._hang_check = HangCheck(facts, attempts, restarts, outbox, attempt_end)

        self.note_checkpoints(checkpoints)

        # After a takeover: a job that has failed, or was asked to save and exit, ends.
        if last.ending:
            next_attempt.note_decision(End(last.ending, "that was decided before the coordinator was lost"))

        if last.preempt_signal:
            attempt_end.decide_after_request(now)

    def take_commands(self) -> list[Command]:
        """Return the commands that were issued since the last call, oldest first."""
        return self._outbox.take()

    def coordinator_state(self, now: float) -> CoordinatorState:
        """Return the state that a successor would start from."""
        return CoordinatorState(
            nodes=ranges(sorted(self.nodes.joined)),
            attempt=self.attempts.last_number,
            restarts=self.restarts,
            dismissals=self.nodes.dismissals,
            settings=self.facts.settings.model_dump(),
            preempt_signal=self._save_requests.preempt_signal,
            ending=self.final_end.ending if self.final_end is not None else None,
            clock=now,
        )

    @property
    def final_end(self) -> End | None:
        """How the job ends when all ranks are gone, if no later signal changes that; None otherwise."""
        return self._next_attempt.final_end

    def note_checkpoints(self, checkpoints: CheckpointFacts) -> None:
        """The coordinator has looked at the checkpoints. It does so before it reports anything else."""
        self.facts.checkpoints = checkpoints
        self.restarts.note_checkpoint(checkpoints.newest_step)
        if self.attempts.newest is not None:
            self.attempts.newest.note_newest_step(checkpoints.newest_step)

    @property
    def next_due(self) -> float:
        """When `tick` acts, if nothing happens before: on nodes, exits of ranks or stacks that did not come in time."""
        parts = (self._next_attempt.due, self._rank_exits.due, self._hang_check.due)
        return min(self.status.deadline, self.attempts.starts_due, *parts)

    def receive(self, node: int, message: ToCoordinator, now: float) -> None:
        """Act on the message of a node, which may be the coordinating one."""
        match message:
            case RankExited():
                self._rank_exits.rank_exited(message, now)
            case RanksGone():
                self.ranks_gone(node, message.attempt, now)
            case NodeFailed():
                self.node_failed(node, message, now)
            case Stacks():
                self._hang_check.add_stacks(node, message, now)
            case NodeHeartbeat():
                self.heartbeat_received(node, message, now)
            case SettingsRead():
                self.settings_read(LauncherSettings(**message.settings))
            case SignalReceived():
                self.preempt_requested(message.signal, now, node)
            case _:
                assert_never(message)

    # ---- nodes come and go ----

    def node_joined(self, node: Node, now: float) -> None:
        """A node has joined. Running ranks are asked to save, so that the next attempt can include it."""
        self._add_node(node, now)
        self._save_requests.include_new_node(now)

    def node_returned(self, old_number: int, node: Node, now: float) -> None:
        """A node has made a new connection, under a new number, before the loss of its old one was noticed."""
        # Add it first: a job that needs all its nodes would end if one were missing for a moment.
        self._add_node(node, now)
        self.node_lost(old_number, "it has made a new connection", now)
        self._save_requests.include_new_node(now)

    def _add_node(self, node: Node, now: float) -> None:
        """Add a node to the job, and announce it, unless it is the coordinating node itself."""
        self.nodes.add(node, now)
        if node.number != COORDINATOR:
            text = f"node {node.number} ({node.host}) joined; {plural(len(self.nodes.joined), 'node')}"
            self._outbox.node_news.announce("joined", node.host, text, now)

    def node_lost(self, number: int, why: str, now: float) -> None:
        """A node is lost: its connection, or it does not do what it should. `why` is as in `JobNodes.loss_of`.

        The attempt fails if ranks were still running there.
        """
        if number in self.nodes.joined and self.status.current is not JobStatus.OVER:
            self._attempt_end.handle_failure(self.nodes.loss_of(number, why), now)

    def took_over(self, failure: Failure, now: float) -> None:
        """This node has taken over from a lost coordinator. The usual rules decide whether the job restarts."""
        if self.attempts.last_number is None:
            self._attempt_end.announce_failure(failure)
            return

        # The job had failed, or was asked to exit, and its ranks are gone by now: `NextAttempt` ends it.
        end = self._next_attempt.decided_end
        if end is not None:
            self._attempt_end.announce_failure(failure, f"not restarted: {end.reason}")
            return

        self._attempt_end.handle_failure(failure, now)
        if isinstance(self._next_attempt.decision, Restart):
            self._next_attempt.announce_missing(now)

    # ---- ranks end ----

    def ranks_gone(self, node: int, attempt_number: int, now: float) -> None:
        """A node has killed its ranks, and they are gone."""
        if attempt_number == self.attempts.last_number:
            self._attempt_end.ranks_gone(node, now)

    def node_failed(self, node: int, message: NodeFailed, now: float) -> None:
        """A node has lost its ranks, or cannot start any. A zygote that dies between two attempts is replaced."""
        # A node that is lost has taken its ranks with it.
        if node not in self.nodes.joined or self.status.current is JobStatus.OVER:
            return

        attempt = self.attempts.active
        had_ranks = attempt is not None and attempt.number == message.attempt
        if had_ranks or message.what is LauncherFailure.IMPORT:
            host = self.nodes.joined[node].host
            failure = Failure.by_launcher(message.what, message.why, host=host, node=node, for_user=message.for_user)
            self._attempt_end.handle_failure(failure, now)

    # ---- heartbeats and hangs ----

    def heartbeat_received(self, node: int, beat: NodeHeartbeat, now: float) -> None:
        """A node has sent its heartbeat, with the views of its ranks."""
        self.nodes.last_heartbeats[node] = now

        # A late beat of the previous attempt shows ranks that are dead.
        attempt = self.attempts.newest
        if attempt is not None and beat.attempt == attempt.number:
            attempt.awaiting_start.discard(node)
            attempt.watchdog.note_views(node, beat.views)

    def settings_read(self, settings: LauncherSettings) -> None:
        """Rank 0 has read the settings of the task. All attempts have the same."""
        self.facts.settings = settings
        if self.attempts.newest is not None:
            self.attempts.newest.watchdog.configure(settings.hang)

    def check_for_hangs(self, now: float) -> None:
        """Look for ranks that stall; called about once a second."""
        self._hang_check.check(now)

    # ---- requests to save and exit ----

    def preempt_requested(self, signal: str, now: float, node: int = COORDINATOR) -> None:
        """A signal at a node asks the job to save and exit. After a second Ctrl-C the ranks are killed at once."""
        at_once = self._save_requests.note_signal(signal, node, now)

        match self.status.current:
            case JobStatus.RUN | JobStatus.SAVE_AND_EXIT if at_once:
                self._outbox.announce("second Ctrl-C: killing the ranks")
                self._attempt_end.end_at_once(now)

            case JobStatus.RUN:
                self._save_requests.announce_signal(signal)
                self._save_requests.ask_ranks(now)

            case JobStatus.JOIN | JobStatus.KILL:
                self._attempt_end.call_off_next_attempt(now)

            case JobStatus.SAVE_AND_EXIT | JobStatus.OVER:
                pass  # the ranks save already, and what follows depends on how they end

    def kill_if_nothing_to_save(self, now: float) -> None:
        """Kill ranks that were asked to save, and have nothing to save; called about once a second."""
        if self._save_requests.nothing_to_save:
            self._attempt_end.end_with_nothing_to_save(now)

    def resize_requested(self, ranks: int, now: float) -> None:
        """`lockstep resize` asks for another number of ranks."""
        # No other attempt will start.
        if self._save_requests.preempt_signal or self.final_end:
            self._outbox.announce(f"not resized to {plural(ranks, 'rank')}: the job is ending")
        else:
            self._save_requests.resize(ranks, now)

    # ---- time ----

    def tick(self, now: float) -> None:
        """Let time pass: act on everything that has not come in time."""
        self._outbox.node_news.sum_up(now, len(self.nodes.joined))

        # While no rank runs, start the next attempt if its nodes are there, or end the job if that is decided.
        if self.status.current is JobStatus.JOIN:
            self._next_attempt.tick(now)

        # A node that does not even start its ranks would hold up the others, which wait for them in the rendezvous.
        if now >= self.attempts.starts_due:
            for node in self.attempts.unconfirmed_nodes:
                self.node_lost(node, f"it did not start its ranks within {START_S:.0f} s", now)

        # A rank that has failed explains everything else, so nothing else is looked at, even while `RankExits` waits
        # for an earlier failure.
        if now >= self._rank_exits.due:
            self._rank_exits.handle_root_failure_if_sure(now)
            return

        # Then the stacks of ranks that stall. They come before the deadline, which may be what they were collected for.
        if now >= self._hang_check.due:
            self._hang_check.judge(now)
            return

        if self.status.take_deadline(now):
            self._deadline_passed(now)

    def _deadline_passed(self, now: float) -> None:
        """Act on the deadline of the current status."""
        attempt = self.attempts.newest
        match self.status.current:
            case JobStatus.SAVE_AND_EXIT if attempt is not None and attempt.has_failed:
                self._attempt_end.handle_failure(attempt.root_failure(), now)

            case JobStatus.SAVE_AND_EXIT:
                self._hang_check.grace_is_over(now)

            case JobStatus.KILL:
                self._go_on_without_overdue(now)

            case JobStatus.JOIN | JobStatus.RUN | JobStatus.OVER:
                pass  # `NextAttempt` acts on the deadline of JOIN; RUN and OVER have none

    def _go_on_without_overdue(self, now: float) -> None:
        """Go on without the nodes whose killed ranks did not end in time."""
        overdue = self._attempt_end.overdue_nodes
        late = f"did not end within {NODES_KILL_S:.0f} s"

        # The ranks of the coordinating node still hold the run folder.
        if COORDINATOR in overdue:
            self._next_attempt.end_without_attempt(f"killed ranks on this machine {late}", now)
            return

        for node in overdue:
            self.node_lost(node, f"its killed ranks {late}", now)
