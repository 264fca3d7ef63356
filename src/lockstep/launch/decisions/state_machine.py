"""The decisions of a job: when ranks are started, on which nodes, and what follows when something happens.

`JobStateMachine` is called with what happens, and issues commands; nothing here starts a process or waits for one.
From the disk it reads the step of the newest checkpoint, and whether one is about to be committed. An attempt is a set
of ranks that live and die together. After a failure all of them are killed, and a new attempt resumes from the newest
checkpoint, unless there is a reason not to.

`phases.py` has the phases of the job, with a table of their transitions. What happens is noted in the `JobState`, and
each part of the state machine looks after some of the phases:

    NextAttempt       JOIN: waits for nodes, starts the next attempt, or ends the job
    HangCheck         RUN, COLLECT_STACKS, PREEMPT: finds ranks that stand still
    Preemption        PREEMPT: asks the ranks to save and exit
    FailureHandler    KILL: decides what follows a failure, and has all ranks killed

A node that takes over from a lost coordinator begins in JOIN, with the last `CoordinatorState` that it received.
"""

from __future__ import annotations

from collections.abc import Callable

from lockstep.errors import ExitCode, plural
from lockstep.launch.decisions.cluster import Node
from lockstep.launch.decisions.commands import Command, DropNode
from lockstep.launch.decisions.failure_handler import FailureHandler
from lockstep.launch.decisions.hang_check import HangCheck
from lockstep.launch.decisions.next_attempt import NextAttempt
from lockstep.launch.decisions.phases import (
    ACTIVE,
    COMMIT_S,
    FENCE_S,
    LOST_PEER_WAIT_S,
    NODES_KILL_S,
    PEER_WAIT_S,
    QUIET_S,
    START_S,
    STRAGGLER_GRACE_S,
    JobPhase,
)
from lockstep.launch.decisions.preemption import Preemption
from lockstep.launch.decisions.recovery import Restart
from lockstep.launch.decisions.settings import Settings
from lockstep.launch.decisions.state import JobState
from lockstep.launch.failure import PREEMPTED, Failure, LauncherFailure
from lockstep.launch.job import COORDINATOR, Job
from lockstep.launch.wire.messages import (
    CoordinatorState,
    JobEnd,
    NodeBeat,
    RankExited,
    Stacks,
    ZygoteLost,
    ranges,
)


class JobStateMachine:
    """The decisions of a job.

    The public methods are called when something has happened, and issue commands; `take_commands` returns them.
    `latest_step` and `commit_is_near` look at the checkpoints (see `JobState`), and `now` is always the time of a
    monotonic clock. `inherited` is the last state of a lost coordinator.
    """

    def __init__(
        self,
        job: Job,
        latest_step: Callable[[], int | None],
        commit_is_near: Callable[[int], bool],
        now: float,
        inherited: CoordinatorState | None = None,
    ):
        # A job without a predecessor starts from an empty state, at once.
        last = inherited or CoordinatorState([])
        not_before = now if inherited is None else now + FENCE_S

        # The parts, in the order in which they know each other: each gets those that it calls.
        self.state = JobState(job, latest_step, commit_is_near, now, last)
        self._preemption = Preemption(self.state, last.preempt_signal)
        self._next_attempt = NextAttempt(self.state, self._preemption, now, not_before)
        self._failure_handler = FailureHandler(self.state, self._preemption, self._next_attempt)
        self._hang_check = HangCheck(self.state, self._failure_handler)

    def take_commands(self) -> list[Command]:
        """Return the commands that were issued since the last call, oldest first."""
        return self.state.outbox.take()

    def coordinator_state(self, now: float) -> CoordinatorState:
        """Return the state that a successor would start from."""
        return CoordinatorState(
            ranges(sorted(self.state.cluster.nodes)),
            self.state.attempt.number,
            self.state.recovery.restarts.history(now),
            self.state.settings.model_dump(),
            self._preemption.signal,
        )

    # ---- nodes come and go ----

    def node_joined(self, node: Node, now: float) -> None:
        """A node has joined. Running ranks are asked to save, so that the next attempt can include it."""
        self._add_node(node, now)
        self._preemption.include_new_node(now)

    def node_returned(self, old_number: int, node: Node, now: float) -> None:
        """A node has made a new connection, under a new number, before the loss of its old one was noticed."""
        # Add it first: a job that needs all its nodes would end if one were missing for a moment.
        self._add_node(node, now)
        self.node_lost(old_number, "lost its connection and made a new one", now)
        self._preemption.include_new_node(now)

    def _add_node(self, node: Node, now: float) -> None:
        """Add a node to the cluster. All screens say so, except for the coordinating node itself."""
        self.state.cluster.add(node, now)
        if node.number != COORDINATOR:
            text = f"node {node.number} ({node.host}) joined; {plural(len(self.state.cluster.nodes), 'node')}"
            self.state.node_news.say("joined", node.host, text, now)

    def node_lost(self, number: int, why: str, now: float) -> None:
        """A node is lost. The attempt fails if ranks were still running there. `why` is a verb phrase: "vanished"."""
        state, attempt = self.state, self.state.attempt
        if number not in state.cluster.nodes or state.phase is JobPhase.OVER:
            return

        host = state.cluster.nodes[number].host
        state.cluster.remove(number, now)

        # Nothing is expected of it any more: neither stacks, nor the end of its ranks, nor that it starts them.
        state.unanswered.discard(number)
        attempt.unconfirmed.discard(number)
        state.outbox.put(DropNode(number))

        # The failure names a lost rank, from which `Attempt.count_ended_by` finds the node.
        lost = [rank for rank in attempt.ranks_on(number) if rank not in attempt.exits]
        failure = Failure.by_launcher(
            LauncherFailure.NODE, f"node {number} ({host}) {why}", min(lost, default=None), host
        )
        if state.phase in ACTIVE and lost:
            self._failure_handler.handle(failure, now)
            return

        # Between two attempts, or after its ranks ended, losing a node matters only if too few remain for the next one.
        state.node_news.say("lost", host, failure.message, now)
        if state.phase is JobPhase.JOIN and attempt.started_here:
            self._next_attempt.end_if_too_few()

        self._failure_handler.continue_if_gone(now)

    def took_over(self, failure: Failure, now: float) -> None:
        """This node has taken over from a lost coordinator. The usual rules decide whether the job restarts."""
        if self.state.attempt.number is None:
            self.state.outbox.announce_failure(failure, None, others=0)
            return

        # The ranks are gone already, so a job that was asked to exit ends as preempted.
        decision = self._failure_handler.settle(failure, now, nothing_to_save=True)
        if isinstance(decision, Restart):
            self._next_attempt.say_missing(now)

    # ---- ranks end ----

    def rank_exited(self, message: RankExited, now: float) -> None:
        """A rank has ended. A failure is handled at once, unless the exit of another rank may have come first."""
        # Messages of an earlier attempt may still arrive.
        if not self._concerns_running_ranks(message.attempt):
            return

        rank_exit = message.exit
        self.state.attempt.exits[message.rank] = rank_exit

        # No later exit can explain this one, so decide now, unless rank 0 commits a checkpoint first.
        died_by_itself = not rank_exit.may_be_a_consequence
        if died_by_itself and not self._commit_is_near():
            self._failure_handler.handle(self.state.attempt.root_failure(), now)
            return

        if died_by_itself:
            self._wait_at_most(0.0, now)
        elif not rank_exit.clean:
            # The exit of a rank that failed first may still arrive.
            self._wait_at_most(LOST_PEER_WAIT_S if rank_exit.reports_lost_peer else PEER_WAIT_S, now)
        elif rank_exit.code == PREEMPTED:
            self._wait_for_stragglers(now)

        if self.state.attempt.all_exited:
            self._all_exited(now)

    def _concerns_running_ranks(self, attempt: int | None) -> bool:
        """Return whether a message is about the current attempt, while its ranks run."""
        return attempt == self.state.attempt.number and self.state.phase in ACTIVE

    def _wait_at_most(self, seconds: float, now: float) -> None:
        """Wait before a rank's failure is handled, which `_deadline_passed` does; a commit may take longer."""
        # The rank that failed explains why the others stand still: their stacks are no longer needed.
        if self.state.phase is JobPhase.COLLECT_STACKS:
            self.state.enter(JobPhase.RUN)

        self.state.deadline = min(self.state.deadline, now + seconds)

    def _commit_is_near(self) -> bool:
        """Return whether rank 0 runs, and has yet to commit a checkpoint that all ranks have written."""
        attempt = self.state.attempt
        return 0 in attempt.running and self.state.commit_is_near(len(attempt.ranks))

    def _wait_for_stragglers(self, now: float) -> None:
        """Wait for the other ranks, after one has saved and exited."""
        if self.state.phase is not JobPhase.PREEMPT:
            self._preemption.ranks_were_signalled(now)

        # Preempted ranks exit together, unless the signal came before the process group existed: then the rest
        # never will.
        self.state.deadline = min(self.state.deadline, now + STRAGGLER_GRACE_S)

    def _all_exited(self, now: float) -> None:
        """End the job, or begin the next attempt: after a resize, or with a new node."""
        attempt = self.state.attempt
        # The exits of ranks that failed came first: they explain the rest.
        if attempt.has_failed:
            self._failure_handler.handle(attempt.root_failure(), now)
        elif not attempt.any_preempted:
            self.state.end(JobEnd(ExitCode.FINISHED))
        elif self._preemption.signal:
            self._preemption.end_job()
        else:
            self._next_attempt.wait_for_nodes(now)

    def ranks_gone(self, node: int, attempt: int, now: float) -> None:
        """A node has killed its ranks, and they are gone."""
        if attempt == self.state.attempt.number and self.state.phase is JobPhase.KILL:
            self.state.unanswered.discard(node)
            self._failure_handler.continue_if_gone(now)

    def zygote_lost(self, node: int, message: ZygoteLost, now: float) -> None:
        """The process that forks a node's ranks has died. Between two attempts that is not a failure."""
        # A node that is lost has taken its ranks with it.
        if node not in self.state.cluster.nodes:
            return

        # The failure names the node's first rank, from which `Attempt.count_ended_by` finds the others.
        first = min(self.state.attempt.ranks_on(node), default=None)
        failure = Failure.by_launcher(LauncherFailure.ZYGOTE, message.why, first, self.state.cluster.nodes[node].host)

        if message.cannot_import and self.state.phase is not JobPhase.OVER:
            self._failure_handler.end_because_imports_fail(failure, now)
        elif self._concerns_running_ranks(message.attempt):
            self._failure_handler.handle(failure, now)

    # ---- heartbeats and hangs ----

    def beat_received(self, node: int, beat: NodeBeat, now: float) -> None:
        """A node has sent its heartbeat: the views of its ranks and, from the node of rank 0, the settings."""
        self.state.cluster.last_beats[node] = now

        # A late beat of the previous attempt shows ranks that are dead.
        attempt = self.state.attempt
        if beat.attempt == attempt.number:
            attempt.unconfirmed.discard(node)
            attempt.watchdog.note_views(node, beat.views)

        # All attempts have the same settings.
        if beat.settings:
            self.state.settings = Settings(**beat.settings)
            attempt.watchdog.set_limits(self.state.settings.hang)

    def check_for_hangs(self, now: float) -> None:
        """Look for ranks that stand still; called about once a second."""
        self._hang_check.check(now)

    def stacks_received(self, node: int, message: Stacks, now: float) -> None:
        """A node has sent the stacks of its ranks, for the watchdog to judge."""
        self._hang_check.add_stacks(node, message, now)

    # ---- requests to save and exit ----

    def preempt_requested(self, signal: str, now: float, node: int = COORDINATOR) -> None:
        """A signal at a node asks the job to save and exit. After a second Ctrl-C the ranks are killed at once."""
        at_once = self._preemption.note_signal(signal, node, now)

        match self.state.phase:
            case JobPhase.RUN | JobPhase.COLLECT_STACKS | JobPhase.PREEMPT if at_once:
                self.state.outbox.say("second Ctrl-C: killing the ranks")
                # The exit code is that of the first signal, and it is known before the ranks are gone.
                self._next_attempt.plan_end(JobEnd(self._preemption.exit_code))
                self._failure_handler.order_kill(now)

            case JobPhase.RUN | JobPhase.COLLECT_STACKS:
                ranks = plural(len(self.state.attempt.ranks), "rank")
                self.state.outbox.say(f"{signal}: asking {ranks} to save and exit")
                self._preemption.ask_ranks(now)

            case _:
                pass  # `NextAttempt` ends the job: in JOIN, or once the ranks are gone

    def resize_requested(self, ranks: int, now: float) -> None:
        """`lockstep resize` asks for another number of ranks."""
        self._preemption.resize(ranks, now)

    # ---- time ----

    def tick(self, now: float) -> None:
        """Let time pass.

        Start the next attempt if its nodes are there, or end the job if that is planned; drop nodes that did not start
        their ranks in time; act on the deadline of the current phase.
        """
        state = self.state

        state.node_news.sum_up(now, len(state.cluster.nodes))
        if state.phase is JobPhase.JOIN:
            self._next_attempt.tick(now)

        # A node that does not even start its ranks would hold up the others, which wait for them in the rendezvous.
        if now > state.attempt.confirm_by and state.phase in ACTIVE:
            for node in sorted(state.attempt.unconfirmed & state.cluster.nodes.keys()):
                self.node_lost(node, f"was dropped: it did not start its ranks within {START_S:.0f} s", now)

        if now >= state.deadline:
            self._deadline_passed(now)

    def _deadline_passed(self, now: float) -> None:
        """Act on the deadline of the current phase."""
        state, attempt = self.state, self.state.attempt
        match state.phase:
            case JobPhase.JOIN:
                self._next_attempt.give_up()

            case JobPhase.COLLECT_STACKS:
                self._hang_check.judge(now)

            case JobPhase.KILL:
                # A rank of this machine that does not die still holds the run folder, so no attempt can follow.
                if COORDINATOR in state.unanswered:
                    self._next_attempt.end_with_ranks_left()
                    return

                # Continue without the other nodes that could not kill their ranks.
                for node in sorted(state.unanswered):
                    self.node_lost(node, f"was dropped: its killed ranks did not end within {NODES_KILL_S:.0f} s", now)

            case JobPhase.PREEMPT if not attempt.has_failed:
                # Ranks that were asked to save take too long.
                self._failure_handler.handle(attempt.overdue_failure(), now)

            case JobPhase.RUN | JobPhase.PREEMPT:
                # If a node has gone quiet, its loss may have come before an exception: wait until it shows.
                silence = state.cluster.longest_silence(state.nodes_of_attempt, now)
                quiet = silence > QUIET_S and not attempt.any_died_by_itself

                # If all ranks have written a checkpoint, let rank 0 commit it: the next attempt can start from it.
                commits = now < state.deadline + COMMIT_S and self._commit_is_near()
                if not quiet and not commits:
                    self._failure_handler.handle(attempt.root_failure(), now)
