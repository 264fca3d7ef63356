"""The decisions of a job: when ranks are started, on which nodes, and what follows when something happens.

Events go in, commands come out, and nothing here starts a process or waits. An attempt is a set of ranks that live and
die together. After a failure all of them are killed, and a new attempt resumes from the newest checkpoint, unless there
is a reason not to.

`JobStateMachine` has the phases of the job (a rank has phases too, which its heartbeat shows) and their transitions:

    GATHER --all nodes that may join, or enough nodes and no new one for 3 s--> RUN --all ranks finished--> OVER
    GATHER --too few nodes in time, or a signal--> OVER
    RUN --no rank advances--> ASK --stacks have arrived--> RUN, or KILL if it is a hang
    ASK --a rank has raised--> RUN, which waits for the report of a rank that failed first
    RUN, ASK --signal, resize or new node--> PREEMPT --all ranks saved--> OVER or GATHER
    RUN, ASK, PREEMPT --failure--> KILL --all ranks are gone--> GATHER (the next attempt) or OVER
    any phase but OVER --a zygote cannot import--> KILL

It uses `Cluster` (the nodes, and how many ranks each should run), `Attempt` (the ranks that run now), `Recovery` (what
follows a failure) and `Outbox` (the commands that come out). A node that takes over from a lost coordinator begins in
GATHER, with the last `CoordinatorState` that it received.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from lockstep.errors import ExitCode, Preempted, plural
from lockstep.launch.decisions.attempt import Attempt
from lockstep.launch.decisions.cluster import Cluster, Node
from lockstep.launch.decisions.outbox import Outbox
from lockstep.launch.decisions.recovery import Recovery
from lockstep.launch.decisions.restarts import Settings
from lockstep.launch.failure import PREEMPTED, Failure, Kind
from lockstep.launch.hangs.watchdog import Watchdog
from lockstep.launch.job import COORDINATOR, Job
from lockstep.launch.wire.messages import (
    CollectStacks,
    Command,
    CoordinatorState,
    DropNode,
    JobEnd,
    Kill,
    NodeBeat,
    Preempt,
    Prepare,
    RankExited,
    Stacks,
    StartAttempt,
    ZygoteLost,
    ranges,
)

# How long the job waits for its nodes.
GATHER_S = 300.0

# After an exception, how long to wait for the report of a peer that may have died first.
PEER_WAIT_S = 1.0

# The same wait after an exception that only says that a peer is gone: a large process takes a while to die.
COMPLAINT_WAIT_S = 5.0

# How long the other ranks may take to exit after the first one that was preempted.
STRAGGLER_GRACE_S = 20.0

# A node sends a heartbeat every second. If none came for this long, the node is probably lost.
QUIET_S = 2.0

# How long the coordinator waits for nodes to report that their killed ranks are gone.
NODES_KILL_S = 10.0

# How long a node may take to confirm that it starts its ranks, which happens before they import anything.
START_S = 10.0

# How long the coordinator waits for the nodes' stacks.
NODES_STACKS_S = 5.0

# How long a node that takes over waits before it starts ranks. Rank 0 of the previous coordinator checks once a second
# whether its coordinator was superseded, and ends if so. The other nodes join the new coordinator meanwhile.
FENCE_S = 3.0


class JobPhase(Enum):
    GATHER = "waiting for nodes"
    RUN = "running"
    ASK = "asking for stacks"
    PREEMPT = "waiting for ranks to save and exit"
    KILL = "waiting for killed ranks to be gone"
    OVER = "over"


# Phases in which ranks are running.
ACTIVE = (JobPhase.RUN, JobPhase.ASK, JobPhase.PREEMPT)


class JobStateMachine:
    """The state of a job.

    Public methods handle events and issue commands; `take` returns the commands. `committed` returns the newest
    checkpoint's step, and `now` is always the time of a monotonic clock; the wall clock is read only for failures.
    `inherited` is the last state of a lost coordinator.
    """

    def __init__(
        self, job: Job, committed: Callable[[], int | None], now: float, inherited: CoordinatorState | None = None
    ):
        state = inherited or CoordinatorState([])
        self.job = job
        self.committed = committed
        self.cluster = Cluster(job.nnodes, now)
        self._outbox = Outbox(job.run_dir / "logs")
        self.recovery = Recovery(job, committed, self.cluster, self._outbox, state, now)

        # A placeholder without ranks, until an attempt starts here.
        self.attempt = Attempt(state.attempt, {}, {}, None, Watchdog(self.recovery.settings.hang))

        # Before this time nothing starts, and no planned end is carried out: the old rank 0 may still be alive.
        self._not_before = now if inherited is None else now + FENCE_S

        # RUN has a deadline only once a rank has failed; until then the watchdog covers it. OVER has none.
        self.job_phase = JobPhase.GATHER
        self._deadline = now + GATHER_S

        # Nodes that have not confirmed yet that they start the current attempt, and the deadline for that.
        self._not_started: set[int] = set()
        self._start_by = math.inf

        # Node -> when its last heartbeat came.
        self._last_beat: dict[int, float] = {}

        # Nodes from which an answer is missing: stacks in ASK, the end of their ranks in KILL.
        self._unanswered: set[int] = set()

        # Whether Ctrl-C was typed, and when the current ranks were asked to save and exit.
        self._sigint_seen = state.preempt_signal == "SIGINT"
        self._preempted_at = now

    def take(self) -> list[Command]:
        return self._outbox.take()

    def coordinator_state(self, now: float) -> CoordinatorState:
        """Return the state that a successor would start from."""
        members = ranges(sorted(self.cluster.nodes))
        return CoordinatorState(members, self.attempt.number, **self.recovery.as_fields(now))

    def _enter(self, phase: JobPhase, deadline: float = math.inf) -> None:
        self.job_phase = phase
        self._deadline = deadline

    # ---- nodes come and go ----

    def node_joined(self, node: Node, now: float) -> None:
        """A node has joined. Running ranks are asked to save, so that the next attempt can include it."""
        self.cluster.add(node, now)
        if node.number != COORDINATOR:
            text = f"node {node.number} ({node.host}) joined; {plural(len(self.cluster.nodes), 'node')}"
            self._outbox.say_of_node("joined", node.host, text, now)

        if self.job_phase in (JobPhase.RUN, JobPhase.ASK):
            self._outbox.say("asking the ranks to save, to continue with the new node")
            self._preempt(now)

    def node_lost(self, node: int, why: str, now: float) -> None:
        """A node is lost. The attempt fails if ranks were still running there. `why` is a verb phrase: "vanished"."""
        if node not in self.cluster.nodes or self.job_phase is JobPhase.OVER:
            return

        host = self.cluster.nodes[node].host
        self.cluster.remove(node, now)
        self._last_beat.pop(node, None)
        self._unanswered.discard(node)
        self._not_started.discard(node)
        self._outbox.put(DropNode(node))

        # The failure names the first lost rank, so that repeated failures of one slot are counted.
        lost = [rank for rank in self.attempt.ranks_on(node) if rank not in self.attempt.exits]
        failure = Failure(min(lost, default=-1), host, time.time(), Kind.NODE, f"node {node} ({host}) {why}")
        if self.job_phase in ACTIVE and lost:
            self._fail(failure, now)
            return

        # Between two attempts, or after its ranks ended, losing a node matters only if too few remain.
        self._outbox.say_of_node("were lost", host, failure.message, now)
        if self.cluster.too_few and self.attempt.ranks:
            self.recovery.planned_end = self.recovery.planned_end or JobEnd(
                self.recovery.code_if_nodes_are_missing, failure
            )
            if self.job_phase is JobPhase.GATHER:
                self._outbox.say(f"not restarted: {self.cluster.too_few}. {self.recovery.how_to_continue}")
                self._end(self.recovery.planned_end)

        self._continue_if_killed(now)

    def took_over(self, failure: Failure, now: float) -> None:
        """This node has taken over from a lost coordinator. The usual rules decide whether the job restarts."""
        if self.attempt.number < 0:
            self._outbox.report(failure, self.attempt.number, stopped=0)  # no attempt has started
            return

        # Whether the ranks had trained is not known here: a job that was asked to stop ends as preempted.
        self.recovery.decide(failure, self.attempt, now, nothing_to_save=True)
        if self.recovery.restart_to_log:
            self._say_who_is_missing()

    def _gather(self, now: float) -> None:
        """Wait for nodes. With all of them the next attempt starts at once, and a job that is to end ends at once."""
        self._enter(JobPhase.GATHER, now + GATHER_S)
        self._end_or_start(now)
        if self.job_phase is JobPhase.GATHER:
            self._say_who_is_missing()

    def _end_or_start(self, now: float) -> None:
        """End the job if that is decided already; otherwise start the next attempt if the nodes are there."""
        if self.recovery.planned_end is not None:
            self._end(self.recovery.planned_end)
        elif self.recovery.preempt_signal is not None:
            self._end_preempted()
        elif self.cluster.ready(now):
            self._start_attempt(now)

    def _say_who_is_missing(self) -> None:
        missing = self.cluster.bounds.least - len(self.cluster.nodes)
        if missing > 0:
            self._outbox.say(f"waiting for {plural(missing, 'more node')} at {self.job.join}")

    # ---- an attempt ----

    def _start_attempt(self, now: float) -> None:
        self._enter(JobPhase.RUN)
        counts = dict(sorted(self.cluster.wanted.items()))
        watchdog = Watchdog(self.recovery.settings.hang, self.recovery.restarts.hang_places)
        hosts = {node: self.cluster.nodes[node].host for node in counts}
        self.attempt = Attempt(self.attempt.number + 1, counts, hosts, self.committed(), watchdog)
        if self.recovery.restart_to_log:
            self.recovery.restart_to_log = False
            numbers = {"attempt": self.attempt.number, "ranks": self.cluster.world_size}
            self._outbox.log("restart", **numbers, step=self.attempt.started_from)

        self._outbox.put(StartAttempt(self.attempt.number, counts))
        self._not_started = counts.keys() - {COORDINATOR}  # the coordinating node starts its own ranks at once
        self._start_by = now + START_S

    def rank_exited(self, event: RankExited, now: float) -> None:
        # Messages of an earlier attempt may still arrive.
        if event.attempt != self.attempt.number or self.job_phase not in ACTIVE:
            return

        rank_exit = event.exit
        self.attempt.exits[event.rank] = rank_exit

        # No later report can explain this exit, so decide now.
        if rank_exit.is_root:
            self._fail(self.attempt.root_failure(), now)
            return

        if not rank_exit.clean:
            # Another rank may have failed first; its report may still arrive.
            if self.job_phase is JobPhase.ASK:
                self._enter(JobPhase.RUN)

            wait = COMPLAINT_WAIT_S if rank_exit.is_complaint else PEER_WAIT_S
            self._deadline = min(self._deadline, now + wait)
        elif rank_exit.code == PREEMPTED:
            # The scheduler may have signalled the ranks directly, bypassing the launcher.
            if self.job_phase is not JobPhase.PREEMPT:
                self.recovery.preempt_signal = "SIGTERM"
                self._enter_preempt(now)

            # Ranks exit together; if only one did, the signal came before the process group existed.
            self._deadline = min(self._deadline, now + STRAGGLER_GRACE_S)

        if self.attempt.all_exited:
            self._all_exited(now)

    def _all_exited(self, now: float) -> None:
        """End the job, or begin the next attempt: after a resize, or with a new node."""
        if not self.attempt.all_clean:
            self._fail(self.attempt.root_failure(), now)
        elif not self.attempt.any_preempted:
            self._end(JobEnd(ExitCode.FINISHED))
        elif self.recovery.preempt_signal:
            self._end_preempted()
        else:
            self._gather(now)

    def zygote_lost(self, node: int, event: ZygoteLost, now: float) -> None:
        """The process that forks a node's ranks has died. Between two attempts that is not a failure."""
        first = min(self.attempt.ranks_on(node), default=-1)
        failure = Failure(first, self.cluster.nodes[node].host, time.time(), Kind.ZYGOTE, event.why)

        if event.hopeless and self.job_phase is not JobPhase.OVER:
            stopped = self.attempt.others_than(failure) if self.job_phase in ACTIVE else 0
            self.recovery.planned_end = JobEnd(ExitCode.FAILED, failure)
            self._outbox.report(failure, self.attempt.number, stopped, "not restarted: it would end the same way")
            self._kill_ranks(now)
        elif event.attempt == self.attempt.number and self.job_phase in ACTIVE:
            self._fail(failure, now)

    # ---- heartbeats and hangs ----

    def beat_received(self, node: int, beat: NodeBeat, now: float) -> None:
        self._last_beat[node] = now

        # A late beat of the previous attempt shows ranks that are dead.
        if beat.attempt == self.attempt.number:
            self._not_started.discard(node)
            self.attempt.watchdog.views[node] = beat.views

        # All attempts have the same settings.
        if beat.settings:
            self.recovery.settings = Settings(**beat.settings)
            self.attempt.watchdog.limits = self.recovery.settings.hang

    def check_for_hangs(self, now: float) -> None:
        """Ask for stacks if no rank advances; called about once a second."""
        # After a failure the other ranks stand still. That is not a hang, and the failure will be reported soon.
        if not self.attempt.all_clean:
            return

        # Ranks that do not move will not save either.
        if self.job_phase is JobPhase.PREEMPT:
            still = self.attempt.watchdog.stands_still(self.attempt.running, self._preempted_at, now)
            if still:
                self._fail(self.attempt.overdue(still), now, nothing_to_save=not any(view.steps_done for view in still))
            return

        if self.job_phase is not JobPhase.RUN:
            return

        suspicion = self.attempt.watchdog.look(self.attempt.running, now)
        if suspicion is not None:
            self._enter(JobPhase.ASK, now + NODES_STACKS_S)
            self._unanswered = self._nodes_of_attempt()
            self._outbox.send(self._nodes_of_attempt(), CollectStacks(self.attempt.number))

    def stacks_received(self, node: int, event: Stacks, now: float) -> None:
        """A node answered with its ranks' stacks. When all nodes have, the hang can be judged."""
        if event.attempt == self.attempt.number and self.job_phase is JobPhase.ASK:
            self.attempt.watchdog.stacks |= event.stacks
            self.attempt.watchdog.collectives |= event.collectives
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

    def preempt_requested(self, signal: str, now: float) -> None:
        """A signal asks the job to save and exit. After a second Ctrl-C the ranks are killed at once."""
        # Schedulers send SIGTERM more than once, so a second SIGTERM means nothing new.
        at_once = self._sigint_seen and signal == "SIGINT"
        self._sigint_seen |= signal == "SIGINT"
        self.recovery.preempt_signal = self.recovery.preempt_signal or signal

        match self.job_phase:
            case JobPhase.GATHER:
                self._end_preempted()
            case JobPhase.RUN | JobPhase.ASK | JobPhase.PREEMPT if at_once:
                self._outbox.say("stopped at once")
                self.recovery.planned_end = JobEnd(self._preempted_code)
                self._kill_ranks(now)
            case JobPhase.RUN | JobPhase.ASK:
                self._outbox.say(f"{signal}: asking {plural(len(self.attempt.ranks), 'rank')} to save and stop")
                self._preempt(now)
            case _:
                pass  # the job is ending anyway

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

        # Nodes can import torch for the new ranks while the current ranks still save.
        for node, count in self.cluster.wanted.items():
            self._outbox.send([node], Prepare(count))

        if self.job_phase in (JobPhase.RUN, JobPhase.ASK):
            self._preempt(now)

    def _preempt(self, now: float) -> None:
        """Have the ranks save and exit; `tick` kills them when the grace period is over."""
        self._enter_preempt(now)
        self._outbox.send(self._nodes_of_attempt(), Preempt(self.attempt.number))

    def _enter_preempt(self, now: float) -> None:
        self._enter(JobPhase.PREEMPT, now + self.recovery.settings.restart.grace)
        self._preempted_at = now

    @property
    def _preempted_code(self) -> int:
        return Preempted.code_of(self.recovery.preempt_signal)

    def _end_preempted(self) -> None:
        step = self.committed()
        saved = "stopped before anything was saved" if step is None else f"saved at step {step}"
        self._outbox.say(f"{saved}; to resume: {self.job.resume_command}")
        self._outbox.log("preempted", signal=self.recovery.preempt_signal, step=step)
        self._end(JobEnd(self._preempted_code))

    # ---- time ----

    def tick(self, now: float) -> None:
        """Start an attempt that is ready and act on the deadline of the current phase."""
        self._outbox.sum_up(now, len(self.cluster.nodes))
        if self.job_phase is JobPhase.GATHER and now >= self._not_before:
            self._end_or_start(now)

        if now > self._start_by and self.job_phase in ACTIVE:
            for node in sorted(self._not_started & self.cluster.nodes.keys()):
                self.node_lost(node, f"was dropped: it has not started its ranks within {START_S:.0f} s", now)

        if now < self._deadline:
            return

        # The deadline of this phase has passed.
        match self.job_phase:
            case JobPhase.GATHER:
                problem = f"only {plural(len(self.cluster.nodes), 'node')} came within {GATHER_S:.0f} s"
                self._outbox.say(f"{problem}; {self.cluster.bounds.least} are needed. {self.recovery.how_to_continue}")
                failure = Failure(-1, "", time.time(), Kind.NODE, problem)
                self._end(JobEnd(self.recovery.code_if_nodes_are_missing, failure))

            case JobPhase.ASK:
                self._judge_hang(now)

            case JobPhase.KILL:
                # Continue without the nodes that could not kill their ranks.
                for node in sorted(self._unanswered):
                    self.node_lost(node, f"vanished: its ranks did not end within {NODES_KILL_S:.0f} s", now)

            case JobPhase.PREEMPT if self.attempt.all_clean:
                # Ranks that were asked to save take too long.
                self._fail(self.attempt.overdue(), now)

            case JobPhase.RUN | JobPhase.PREEMPT:
                # A rank raised. If a node has gone quiet, its loss may have come first: wait for that report.
                beats = [self._last_beat.get(node, now) for node in self._nodes_of_attempt()]
                if now - min(beats, default=now) <= QUIET_S:
                    self._fail(self.attempt.root_failure(), now)

    # ---- failures ----

    def _fail(self, failure: Failure, now: float, nothing_to_save: bool = False) -> None:
        """Report the failure, decide what follows and kill all ranks."""
        self.recovery.decide(failure, self.attempt, now, nothing_to_save)
        self._kill_ranks(now)

    def _kill_ranks(self, now: float) -> None:
        """Have every node kill its ranks; `_continue_if_killed` goes on when they are gone."""
        self._enter(JobPhase.KILL, now + NODES_KILL_S)
        self._unanswered = self._nodes_of_attempt()
        self._outbox.send(self._nodes_of_attempt(), Kill(self.attempt.number))
        self._continue_if_killed(now)

    def ranks_gone(self, node: int, attempt: int, now: float) -> None:
        if attempt == self.attempt.number and self.job_phase is JobPhase.KILL:
            self._unanswered.discard(node)
            self._continue_if_killed(now)

    def _continue_if_killed(self, now: float) -> None:
        """End the job or gather the nodes, if the ranks were killed and the last node has said that they are gone."""
        if self.job_phase is JobPhase.KILL and not self._unanswered:
            self._gather(now)

    def _end(self, ending: JobEnd) -> None:
        self._enter(JobPhase.OVER)
        self._outbox.put(replace(ending, restarts=self.recovery.restarts.total))

    def _nodes_of_attempt(self) -> set[int]:
        return self.attempt.nodes & self.cluster.nodes.keys()
