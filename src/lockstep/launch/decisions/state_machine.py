"""The decisions of a job: when ranks are started, on which nodes, and what follows when something happens.

Its methods are called with what happens, and issue commands; nothing here starts a process or waits for one. All that
is read from the disk is the step of the newest checkpoint, where a decision depends on it. An attempt is a set of ranks
that live and die together. After a failure all of them are killed, and a new attempt resumes from the newest
checkpoint, unless there is a reason not to.

`phases.py` has the phases of the job, with a table of their transitions. `JobStateMachine` uses `Cluster` (the nodes,
and how many ranks each should run), `Attempt` (the ranks that run now), `Recovery` (what follows a failure),
`PreemptRequest` (the signal that asked the job to save and exit) and `Outbox` (the commands that come out). A node that
takes over from a lost coordinator begins in JOIN, with the last `CoordinatorState` that it received.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from lockstep.errors import ExitCode, plural
from lockstep.launch.decisions.attempt import Attempt
from lockstep.launch.decisions.cluster import Cluster, Node
from lockstep.launch.decisions.commands import Command, DropNode, StartAttempt
from lockstep.launch.decisions.missing_nodes import MissingNodes
from lockstep.launch.decisions.outbox import Outbox
from lockstep.launch.decisions.phases import (
    ACTIVE,
    FENCE_S,
    JOIN_S,
    LOST_PEER_WAIT_S,
    NODES_KILL_S,
    NODES_STACKS_S,
    PEER_WAIT_S,
    QUIET_S,
    START_S,
    STRAGGLER_GRACE_S,
    JobPhase,
)
from lockstep.launch.decisions.preemption import PreemptRequest
from lockstep.launch.decisions.recovery import Decision, End, EndPreempted, Recovery, Restart, Situation, UndoResize
from lockstep.launch.decisions.settings import Settings
from lockstep.launch.failure import PREEMPTED, Failure, Kind
from lockstep.launch.hangs.watchdog import Watchdog
from lockstep.launch.job import COORDINATOR, Job
from lockstep.launch.wire.messages import (
    CollectStacks,
    CoordinatorState,
    JobEnd,
    Kill,
    NodeBeat,
    Preempt,
    Prepare,
    RankExited,
    Stacks,
    ZygoteLost,
    ranges,
)


class JobStateMachine:
    """The state of a job.

    The public methods are called when something has happened, and issue commands; `take` returns the commands.
    `latest_step` returns the step of the newest checkpoint, and `now` is always the time of a monotonic clock.
    `inherited` is the last state of a lost coordinator.
    """

    def __init__(
        self, job: Job, latest_step: Callable[[], int | None], now: float, inherited: CoordinatorState | None = None
    ):
        state = inherited or CoordinatorState([])

        self.job = job
        self._latest_step = latest_step

        # The parts of the decision: the nodes, the failures, the commands, and the ranks that run now.
        self.cluster = Cluster(job.nnodes, now)
        self._outbox = Outbox(job.run_dir / "logs")
        self.recovery = Recovery(self.cluster, state, now)
        self.settings = Settings(**state.settings)
        self.attempt = Attempt(state.attempt, {}, {}, None, Watchdog(self.settings.hang), started_here=False)

        self._preempt_request = PreemptRequest(state.preempt_signal)

        # How the job ends once all ranks are gone. None if another attempt follows, or if the job ends as preempted; a
        # second Ctrl-C sets it at once.
        self._planned_end: JobEnd | None = None

        # Whether the next attempt is logged as a restart when it starts; its size is not known before.
        self._log_restart = False

        # Until then `tick` neither starts an attempt nor ends the job: the old rank 0 may still be alive.
        self._not_before = now if inherited is None else now + FENCE_S

        # RUN has a deadline only while an earlier failure may arrive; until then the watchdog covers it. OVER has none.
        self.job_phase = JobPhase.JOIN
        self._deadline = now + JOIN_S

        self._missing_nodes = MissingNodes(self.cluster, job.join, now)

        # Nodes from which an answer is missing: stacks in COLLECT_STACKS, the end of their ranks in KILL.
        self._unanswered: set[int] = set()

    def take(self) -> list[Command]:
        return self._outbox.take()

    def coordinator_state(self, now: float) -> CoordinatorState:
        """Return the state that a successor would start from."""
        return CoordinatorState(
            ranges(sorted(self.cluster.nodes)),
            self.attempt.number,
            settings=self.settings.model_dump(),
            preempt_signal=self._preempt_request.signal,
            **self.recovery.restarts.as_fields(now),
        )

    def _enter(self, phase: JobPhase, deadline: float = math.inf) -> None:
        self.job_phase = phase
        self._deadline = deadline

    # ---- nodes come and go ----

    def node_joined(self, node: Node, now: float) -> None:
        """A node has joined. Running ranks are asked to save, so that the next attempt can include it."""
        self._add_node(node, now)
        self._ask_to_include_node(now)

    def node_returned(self, old: int, node: Node, now: float) -> None:
        """Node `old` has made a new connection, under a new number, before the loss of its old one was noticed."""
        # Add it first: a job that needs all its nodes would end if one were missing for a moment.
        self._add_node(node, now)
        self.node_lost(old, "has lost its connection and made a new one", now)
        self._ask_to_include_node(now)

    def _add_node(self, node: Node, now: float) -> None:
        self.cluster.add(node, now)
        if node.number != COORDINATOR:
            text = f"node {node.number} ({node.host}) joined; {plural(len(self.cluster.nodes), 'node')}"
            self._outbox.say_about_node("joined", node.host, text, now)

    def _ask_to_include_node(self, now: float) -> None:
        if self.job_phase in (JobPhase.RUN, JobPhase.COLLECT_STACKS):
            self._outbox.say("asking the ranks to save, to continue with the new node")
            self._preempt(now)

    def node_lost(self, node: int, why: str, now: float) -> None:
        """A node is lost. The attempt fails if ranks were still running there. `why` is a verb phrase: "vanished"."""
        if node not in self.cluster.nodes or self.job_phase is JobPhase.OVER:
            return

        host = self.cluster.nodes[node].host
        self.cluster.remove(node, now)
        self._unanswered.discard(node)
        self.attempt.unconfirmed.discard(node)
        self._outbox.put(DropNode(node))

        # The failure names a lost rank, from which `Attempt.count_ended_by` finds the node.
        lost = [rank for rank in self.attempt.ranks_on(node) if rank not in self.attempt.exits]
        failure = Failure.noticed(Kind.NODE, f"node {node} ({host}) {why}", min(lost, default=None), host)
        if self.job_phase in ACTIVE and lost:
            self._fail(failure, now)
            return

        # Between two attempts, or after its ranks ended, losing a node matters only if too few remain for the next one.
        self._outbox.say_about_node("lost", host, failure.message, now)
        if self.job_phase is JobPhase.JOIN and self.attempt.started_here:
            self._end_if_too_few()

        self._continue_if_killed(now)

    def took_over(self, failure: Failure, now: float) -> None:
        """This node has taken over from a lost coordinator. The usual rules decide whether the job restarts."""
        if self.attempt.number is None:
            self._outbox.announce_failure(failure, None, others=0)
            return

        # The ranks are gone already, so a job that was asked to exit ends as preempted.
        decision = self._decide(failure, now, nothing_to_save=True)
        if isinstance(decision, Restart):
            self._missing_nodes.say(self._outbox, self._deadline, now)

    def _after_attempt(self, now: float) -> None:
        """End the job if that is planned or too few nodes are left, or start the next attempt.

        If more nodes may join, the next attempt starts a little later (`Cluster.ready`).
        """
        self._enter(JobPhase.JOIN, now + JOIN_S)
        self._end_or_start(now)
        if self.job_phase is JobPhase.JOIN:
            self._end_if_too_few()

    def _end_if_too_few(self) -> None:
        """End the job if nodes are missing after an attempt. A restart may have been announced before they left."""
        if shortage := self.cluster.shortage:
            self._outbox.say(f"not restarted: {shortage}. {self._how_to_continue(self._latest_step())}")
            self._end(JobEnd(self.settings.code_if_nodes_are_missing, Failure.noticed(Kind.NODE, shortage)))

    def _end_or_start(self, now: float) -> None:
        """End the job if that is decided already; otherwise start the next attempt if the nodes are there."""
        if self._planned_end is not None:
            self._end(self._planned_end)
        elif self._preempt_request.signal is not None:
            self._end_preempted()
        elif self.cluster.ready(now):
            self._start_attempt(now)

    # ---- an attempt ----

    def _start_attempt(self, now: float) -> None:
        self._enter(JobPhase.RUN)
        counts = dict(sorted(self.cluster.wanted.items()))
        watchdog = Watchdog(self.settings.hang, self.recovery.restarts.hang_places)
        hosts = {node: self.cluster.nodes[node].host for node in counts}
        number = self.attempt.next_number
        self.attempt = Attempt(number, counts, hosts, self._latest_step(), watchdog)

        # The coordinating node starts its ranks at once. The others confirm that they do with their next heartbeat.
        self.attempt.unconfirmed = counts.keys() - {COORDINATOR}
        self.attempt.confirm_by = now + START_S

        # Only now is it known how many ranks restart.
        if self._log_restart:
            self._log_restart = False
            ranks = self.cluster.world_size
            self._outbox.log("restart", attempt=number, ranks=ranks, step=self.attempt.started_from)

        self._outbox.put(StartAttempt(number, counts))

    def rank_exited(self, message: RankExited, now: float) -> None:
        # Messages of an earlier attempt may still arrive.
        if message.attempt != self.attempt.number or self.job_phase not in ACTIVE:
            return

        rank_exit = message.exit
        self.attempt.exits[message.rank] = rank_exit

        # No later exit can explain this one, so decide now.
        if not rank_exit.may_be_a_consequence:
            self._fail(self.attempt.root_failure(), now)
            return

        if not rank_exit.clean:
            # Another rank may have failed first; its exit may still arrive.
            if self.job_phase is JobPhase.COLLECT_STACKS:
                self._enter(JobPhase.RUN)

            wait = LOST_PEER_WAIT_S if rank_exit.reports_lost_peer else PEER_WAIT_S
            self._deadline = min(self._deadline, now + wait)
        elif rank_exit.code == PREEMPTED:
            # The scheduler may have signalled the ranks directly, bypassing the launcher.
            if self.job_phase is not JobPhase.PREEMPT:
                self._preempt_request.signal = "SIGTERM"
                self._enter_preempt(now)

            # Preempted ranks exit together, unless the signal came before the process group existed: then the rest
            # never will.
            self._deadline = min(self._deadline, now + STRAGGLER_GRACE_S)

        if self.attempt.all_exited:
            self._all_exited(now)

    @property
    def _waits_for_earlier_failure(self) -> bool:
        """Whether a rank has failed, and the exit of a peer that failed first may still arrive."""
        return not self.attempt.all_clean

    def _all_exited(self, now: float) -> None:
        """End the job, or begin the next attempt: after a resize, or with a new node."""
        if not self.attempt.all_clean:
            self._fail(self.attempt.root_failure(), now)
        elif not self.attempt.any_preempted:
            self._end(JobEnd(ExitCode.FINISHED))
        elif self._preempt_request.signal:
            self._end_preempted()
        else:
            self._after_attempt(now)

    def zygote_lost(self, node: int, message: ZygoteLost, now: float) -> None:
        """The process that forks a node's ranks has died. Between two attempts that is not a failure."""
        first = min(self.attempt.ranks_on(node), default=None)
        failure = Failure.noticed(Kind.ZYGOTE, message.why, first, self.cluster.nodes[node].host)

        # A zygote that cannot import would not import on the next attempt either.
        if message.hopeless and self.job_phase is not JobPhase.OVER:
            self._planned_end = JobEnd(ExitCode.FAILED, failure)
            self._announce(failure, "not restarted: it would end the same way")

            # In JOIN there are no ranks, and `tick` ends the job.
            if self.job_phase is not JobPhase.JOIN:
                self._kill_ranks(now)
        elif message.attempt == self.attempt.number and self.job_phase in ACTIVE:
            self._fail(failure, now)

    # ---- heartbeats and hangs ----

    def beat_received(self, node: int, beat: NodeBeat, now: float) -> None:
        self.cluster.last_beats[node] = now

        # A late beat of the previous attempt shows ranks that are dead.
        if beat.attempt == self.attempt.number:
            self.attempt.unconfirmed.discard(node)
            self.attempt.watchdog.views[node] = beat.views

        # All attempts have the same settings.
        if beat.settings:
            self.settings = Settings(**beat.settings)
            self.attempt.watchdog.limits = self.settings.hang

    def check_for_hangs(self, now: float) -> None:
        """Ask for stacks if no rank advances; called about once a second."""
        # After a failure the other ranks stand still. That is not a hang, and the failure will be announced soon.
        if self._waits_for_earlier_failure:
            return

        # Ranks that do not move will not save either.
        if self.job_phase is JobPhase.PREEMPT:
            stuck = self.attempt.ranks_standing_still(now)
            if stuck:
                # Before the first step there is nothing to save.
                trained = any(view.steps_done for view in stuck)
                self._fail(self.attempt.overdue(stuck), now, nothing_to_save=not trained)

            return

        if self.job_phase is not JobPhase.RUN:
            return

        suspicion = self.attempt.watchdog.look(self.attempt.running, now)
        if suspicion is not None:
            self._enter(JobPhase.COLLECT_STACKS, now + NODES_STACKS_S)
            self._unanswered = self._nodes_of_attempt()
            self._order(CollectStacks)

    def stacks_received(self, node: int, message: Stacks, now: float) -> None:
        """A node answered with its ranks' stacks. When all nodes have, the hang can be judged."""
        if message.attempt == self.attempt.number and self.job_phase is JobPhase.COLLECT_STACKS:
            self.attempt.watchdog.stacks |= message.stack_of
            self.attempt.watchdog.collectives |= message.collectives_of
            self._unanswered.discard(node)
            if not self._unanswered:
                self._judge_hang(now)

    def _judge_hang(self, now: float) -> None:
        # It is not a hang if some rank has advanced in the meantime or is compiling.
        self._enter(JobPhase.RUN)
        failure = self.attempt.watchdog.verdict()
        if failure is not None:
            self._fail(failure, now)
            return

        # Long before the limit is reached, the screen says where the ranks are.
        remark = self.attempt.watchdog.take_remark()
        if remark is not None:
            self._outbox.say(remark)

    # ---- preemption and resizing ----

    def preempt_requested(self, signal: str, now: float, node: int = COORDINATOR) -> None:
        """A signal at a node asks the job to save and exit. After a second Ctrl-C the ranks are killed at once."""
        at_once = self._preempt_request.note(signal, node, now)

        match self.job_phase:
            case JobPhase.RUN | JobPhase.COLLECT_STACKS | JobPhase.PREEMPT if at_once:
                self._outbox.say("second Ctrl-C: killing the ranks")
                self._planned_end = JobEnd(self._preempt_request.exit_code)
                self._kill_ranks(now)
            case JobPhase.RUN | JobPhase.COLLECT_STACKS:
                self._outbox.say(f"{signal}: asking {plural(len(self.attempt.ranks), 'rank')} to save and exit")
                self._preempt(now)
            case _:
                pass  # `tick` ends the job: in JOIN, or once the ranks are gone

    def resize_requested(self, ranks: int, now: float) -> None:
        """Continue with another number of ranks, after a save."""
        bounds = self.cluster.rank_bounds
        if not bounds.least <= ranks <= bounds.most:
            self._outbox.say(f"not resized to {plural(ranks, 'rank')}: --nproc allows {bounds} in all")
            return

        # The same number may be divided over the nodes in another way; that waits for the next attempt.
        before = self.cluster.world_size
        if before == ranks:
            self.cluster.resize(ranks)
            return

        self._outbox.say(f"from {before} to {plural(ranks, 'rank')}: asking the ranks to save")
        self.recovery.resize(ranks, self.attempt)
        self._log_resize(before)

        # Nodes can import torch for the new ranks while the current ranks still save.
        for node, count in self.cluster.wanted.items():
            self._outbox.send([node], Prepare(count))

        if self.job_phase in (JobPhase.RUN, JobPhase.COLLECT_STACKS):
            self._preempt(now)

    def _undo_resize(self) -> None:
        failed = self.cluster.world_size
        self.recovery.undo_resize()
        now = plural(self.cluster.world_size, "rank")
        self._outbox.say(f"not resized to {plural(failed, 'rank')}: continuing with {now}")
        self._log_resize(failed)

    def _log_resize(self, before: int) -> None:
        self._outbox.log("resize", **{"from": before, "to": self.cluster.world_size})

    def _preempt(self, now: float) -> None:
        """Have the ranks save and exit; `tick` kills them when the grace period is over."""
        self._enter_preempt(now)
        self._order(partial(Preempt, signal=self._preempt_request.signal))

    def _enter_preempt(self, now: float) -> None:
        # A failure that has happened is still announced in time.
        deadline = now + self.settings.restart.grace
        self._enter(JobPhase.PREEMPT, min(self._deadline, deadline) if self._waits_for_earlier_failure else deadline)
        self.attempt.preempted_at = now

    def _end_preempted(self) -> None:
        step = self._latest_step()
        if step is None:
            saved = "ended before anything was saved"
        elif self.attempt.has_saved(step):
            saved = f"saved at step {step}"
        else:
            saved = f"ended without another save; the newest checkpoint is of step {step}"

        self._outbox.say(f"{saved}; to resume: {self.job.resume_command}")
        self._outbox.log("preempted", signal=self._preempt_request.signal, step=step)
        self._end(JobEnd(self._preempt_request.exit_code))

    # ---- time ----

    def tick(self, now: float) -> None:
        """Let time pass.

        Start the next attempt if its nodes are there, or end the job if that is planned; drop nodes that did not start
        their ranks in time; act on the deadline of the current phase.
        """
        self._outbox.sum_up(now, len(self.cluster.nodes))
        if self.job_phase is JobPhase.JOIN:
            if now >= self._not_before:
                self._end_or_start(now)

            # The job may have left the phase.
            if self.job_phase is JobPhase.JOIN and self._missing_nodes.due(now):
                self._missing_nodes.say(self._outbox, self._deadline, now)

        if now > self.attempt.confirm_by and self.job_phase in ACTIVE:
            for node in sorted(self.attempt.unconfirmed & self.cluster.nodes.keys()):
                self.node_lost(node, f"was dropped: it has not started its ranks within {START_S:.0f} s", now)

        if now >= self._deadline:
            self._deadline_passed(now)

    def _deadline_passed(self, now: float) -> None:
        """Act on the deadline of the current phase."""
        match self.job_phase:
            case JobPhase.JOIN:
                problem = f"only {plural(len(self.cluster.nodes), 'node')} came within {JOIN_S:.0f} s"
                how = self._how_to_continue(self._latest_step())
                self._outbox.say(f"{problem}; {self.cluster.bounds.least} are needed. {how}")
                failure = Failure.noticed(Kind.NODE, problem)
                self._end(JobEnd(self.settings.code_if_nodes_are_missing, failure))

            case JobPhase.COLLECT_STACKS:
                self._judge_hang(now)

            case JobPhase.KILL:
                # Continue without the nodes that could not kill their ranks.
                for node in sorted(self._unanswered):
                    self.node_lost(node, f"vanished: its ranks did not end within {NODES_KILL_S:.0f} s", now)

            case JobPhase.PREEMPT if not self._waits_for_earlier_failure:
                # Ranks that were asked to save take too long.
                self._fail(self.attempt.overdue(), now)

            case JobPhase.RUN | JobPhase.PREEMPT:
                # A rank raised. If a node has gone quiet, its loss may have come first: wait until it shows.
                if self.cluster.longest_silence(self._nodes_of_attempt(), now) <= QUIET_S:
                    self._fail(self.attempt.root_failure(), now)

    # ---- failures ----

    def _fail(self, failure: Failure, now: float, nothing_to_save: bool = False) -> None:
        """Announce the failure, decide what follows and kill all ranks. `nothing_to_save`: see `Situation`."""
        self._decide(failure, now, nothing_to_save)
        self._kill_ranks(now)

    def _decide(self, failure: Failure, now: float, nothing_to_save: bool) -> Decision:
        """Decide what follows when all ranks are gone, take note of it and announce it with the failure."""
        saved = self._latest_step()
        situation = Situation(self.attempt, saved, self.settings, self._preempt_request.signal, nothing_to_save, now)
        decision = self.recovery.decide(failure, situation)

        match decision:
            case Restart():
                self._log_restart = True
                self.recovery.count_restart(decision, failure, situation)
                self._announce(failure, self.recovery.describe_restart(decision, failure, situation))

            case UndoResize():
                self._announce(failure)
                self._undo_resize()

            case EndPreempted():
                # `_end_or_start` ends the job, since `_preempt_request` has a signal.
                self._announce(failure, "not restarted: the job was asked to save and exit")

            case End(code, reason):
                self._planned_end = JobEnd(code, failure)

                # With nothing saved, the same error would most likely recur, so no command is suggested.
                hopeless = saved is None and failure.likely_to_repeat
                hint = "" if hopeless else f". {self._how_to_continue(saved)}"
                self._announce(failure, f"not restarted: {reason}{hint}")

        return decision

    def _announce(self, failure: Failure, what_follows: str = "") -> None:
        """Announce a failure of the current attempt."""
        others = self.attempt.count_ended_by(failure) if self.job_phase in ACTIVE else 0
        self._outbox.announce_failure(failure, self.attempt.number, others, what_follows)

    def _how_to_continue(self, saved: int | None) -> str:
        """Return what to type after the end of the job. `saved` is the step of the newest checkpoint."""
        how = "start over" if saved is None else "resume"
        return f"To {how}: {self.job.resume_command}"

    def _kill_ranks(self, now: float) -> None:
        """Have every node kill its ranks; `_continue_if_killed` goes on when they are gone."""
        self._enter(JobPhase.KILL, now + NODES_KILL_S)
        self._unanswered = self._nodes_of_attempt()
        self._order(Kill)
        self._continue_if_killed(now)

    def ranks_gone(self, node: int, attempt: int, now: float) -> None:
        if attempt == self.attempt.number and self.job_phase is JobPhase.KILL:
            self._unanswered.discard(node)
            self._continue_if_killed(now)

    def _continue_if_killed(self, now: float) -> None:
        """Go on, if the ranks were killed and the last node has said that they are gone."""
        if self.job_phase is JobPhase.KILL and not self._unanswered:
            self._after_attempt(now)

    def _end(self, ending: JobEnd) -> None:
        self._enter(JobPhase.OVER)
        self._outbox.put(replace(ending, restarts=self.recovery.restarts.total))

    def _order(self, order: Callable[[int], Preempt | Kill | CollectStacks]) -> None:
        """Send an order about this attempt to all nodes that have ranks of it."""
        if self.attempt.number is not None:
            self._outbox.send(self._nodes_of_attempt(), order(self.attempt.number))

    def _nodes_of_attempt(self) -> set[int]:
        return self.attempt.nodes & self.cluster.nodes.keys()
