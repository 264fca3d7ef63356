"""The decisions of a job: when ranks are started, on which nodes, and what follows when something happens.

Events go in, commands come out, and nothing here starts a process or waits. An attempt is a set of ranks that live and
die together. After a failure all of them are killed, and a new attempt resumes from the newest checkpoint, unless there
is a reason not to.

`JobStateMachine` has the phases of the job (a rank has phases too, which its heartbeat shows) and their transitions:

    GATHER --all nodes that may join, or enough nodes and no new one for 3 s--> RUN --all ranks finished--> OVER
    GATHER --too few nodes in time, or a signal--> OVER
    RUN --no rank advances--> ASK --stacks have arrived--> RUN, or KILL if it is a hang
    ASK --a rank has raised--> RUN, which waits for the cause
    RUN, ASK --signal, resize or new node--> PREEMPT --all ranks saved--> OVER or GATHER
    RUN, ASK, PREEMPT --failure--> KILL --all ranks are gone--> GATHER (the next attempt) or OVER
    any phase but OVER --a zygote cannot import--> KILL

It uses `Cluster` (the nodes, and how many ranks each should run), `Attempt` (the ranks that run now) and `Restarts`
(whether a failure is followed by another attempt). A node that takes over from a lost coordinator begins in GATHER,
with the last `CoordinatorState` that it received.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any

from lockstep.errors import Preempted, plural
from lockstep.launch.attempts import Attempt, Restarts, Settings
from lockstep.launch.failure import PREEMPTED, SMALLER, Failure, Kind
from lockstep.launch.hangs.watchdog import Watchdog
from lockstep.launch.job import Cluster, Job, Node
from lockstep.launch.wire.messages import (
    Announce,
    CollectStacks,
    Command,
    CoordinatorState,
    Drop,
    Exited,
    JobEnd,
    Kill,
    LogEvent,
    Message,
    NodeBeat,
    Preempt,
    Prepare,
    Send,
    Stacks,
    StartAttempt,
    ZygoteLost,
)

# How long the job waits for its nodes.
GATHER_S = 300.0

# After an exception, how long to wait for the report of a peer whose death may have caused it.
CAUSE_WAIT_S = 1.0

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


# ---- the job ----


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

    Public methods handle events and queue commands; `take` returns the queue. `committed` returns the newest
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
        self.settings = Settings(**state.settings)
        self.restarts = Restarts.inherited(state, now)

        # A placeholder without ranks, until an attempt starts here.
        self.attempt = Attempt(state.attempt, {}, {}, None, Watchdog(self.settings.hang))

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

        # The first signal that asked the job to save and exit, whether Ctrl-C was typed, and when the current ranks
        # were asked to save and exit.
        self._preempt_signal = state.preempt_signal
        self._sigint_seen = state.preempt_signal == "SIGINT"
        self._preempted_at = now

        # The last attempt before a resize, and its ranks on each node, which are restored if the new size fails.
        self._before_resize: tuple[int, Counter[int]] | None = None

        # How the job ends once all killed ranks are gone; None if another attempt follows, or the job was preempted.
        self._planned_end: JobEnd | None = None

        # Whether to log a `restart` event when the next attempt starts; only then is its number of ranks known.
        self._restart_to_log = False
        self._commands: list[Command] = []

    def take(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands

    def coordinator_state(self, now: float) -> CoordinatorState:
        """Return the state that a successor would start from."""
        return CoordinatorState(
            sorted(self.cluster.nodes),
            self.attempt.number,
            settings=self.settings.model_dump(),
            preempt_signal=self._preempt_signal,
            **self.restarts.as_fields(now),
        )

    def _enter(self, phase: JobPhase, deadline: float = math.inf) -> None:
        self.job_phase = phase
        self._deadline = deadline

    # ---- nodes come and go ----

    def joined(self, node: Node, now: float) -> None:
        """A node has joined. Running ranks are asked to save, so that the next attempt can include it."""
        self.cluster.add(node, now)
        if node.number:
            self._say(f"node {node.number} ({node.host}) joined; {plural(len(self.cluster.nodes), 'node')}")

        if self.job_phase in (JobPhase.RUN, JobPhase.ASK):
            self._say("asking the ranks to save, to continue with the new node")
            self._preempt(now)

    def gone(self, node: int, why: str, now: float) -> None:
        """A node is lost. The attempt fails if ranks were still running there. `why` is a verb phrase: "vanished"."""
        if node not in self.cluster.nodes or self.job_phase is JobPhase.OVER:
            return

        host = self.cluster.nodes[node].host
        self.cluster.remove(node, now)
        self._last_beat.pop(node, None)
        self._unanswered.discard(node)
        self._not_started.discard(node)
        self._commands.append(Drop(node))

        # The failure names the first lost rank, so that repeated failures of one slot are counted.
        lost = [rank for rank in self.attempt.ranks_on(node) if rank in self.attempt.running]
        failure = Failure(min(lost, default=-1), host, time.time(), Kind.NODE, f"node {node} ({host}) {why}")
        if self.job_phase in ACTIVE and lost:
            self._fail(failure, now)
            return

        # Between two attempts, or after its ranks ended, losing a node matters only if too few remain.
        self._say(failure.message)
        if self.cluster.too_few and self._attempt_ran_here:
            self._planned_end = self._planned_end or JobEnd(self._code_after(failure), failure)
            if self.job_phase is JobPhase.GATHER:
                self._say(f"not restarted: {self.cluster.too_few}. {self._how_to_continue}")
                self._end(self._planned_end)

        self._continue_if_gone(now)

    def took_over(self, failure: Failure, now: float) -> None:
        """This node has taken over from a lost coordinator. The usual rules decide whether the job restarts."""
        if self.attempt.number < 0:
            self._report(failure)  # no attempt has started
            return

        # Whether the ranks had trained is not known here: a job that was asked to stop ends as preempted.
        self._decide(failure, now, nothing_to_save=True)
        if self._restart_to_log:
            self._say_who_is_missing()

    def _gather(self, now: float) -> None:
        """Wait for nodes; with one node, or with all of them, the next attempt starts at once."""
        self._enter(JobPhase.GATHER, now + GATHER_S)
        self._say_who_is_missing()
        self._start_if_ready(now)

    def _say_who_is_missing(self) -> None:
        missing = self.cluster.bounds.least - len(self.cluster.nodes)
        if missing > 0:
            self._say(f"waiting for {plural(missing, 'more node')} at {self.job.join}")

    # ---- an attempt ----

    def _start_if_ready(self, now: float) -> None:
        if not self.cluster.ready(now):
            return

        self._enter(JobPhase.RUN)
        counts = dict(sorted(self.cluster.wanted.items()))
        watchdog = Watchdog(self.settings.hang, self.restarts.hang_places)
        hosts = {node: self.cluster.nodes[node].host for node in counts}
        self.attempt = Attempt(self.attempt.number + 1, counts, hosts, self.committed(), watchdog)
        if self._restart_to_log:
            self._restart_to_log = False
            numbers = {"attempt": self.attempt.number, "ranks": self.cluster.world_size}
            self._log({"event": "restart", **numbers, "step": self.attempt.started_from})

        self._commands.append(StartAttempt(self.attempt.number, counts))
        self._not_started = counts.keys() - {0}  # the coordinating node starts its own ranks at once
        self._start_by = now + START_S

    def exited(self, event: Exited, now: float) -> None:
        # Messages of an earlier attempt may still arrive.
        if event.attempt != self.attempt.number or self.job_phase not in ACTIVE:
            return

        rank_exit = event.exit
        self.attempt.exits[event.rank] = rank_exit

        # No later report can explain this exit, so decide now.
        if rank_exit.is_cause:
            self._fail(self.attempt.root_cause(), now)
            return

        if not rank_exit.clean:
            # Another rank may be the cause; its report may still arrive.
            if self.job_phase is JobPhase.ASK:
                self._enter(JobPhase.RUN)

            wait = COMPLAINT_WAIT_S if rank_exit.is_complaint else CAUSE_WAIT_S
            self._deadline = min(self._deadline, now + wait)
        elif rank_exit.code == PREEMPTED:
            # The scheduler may have signalled the ranks directly, bypassing the launcher.
            if self.job_phase is not JobPhase.PREEMPT:
                self._preempt_signal = "SIGTERM"
                self._enter_preempt(now)

            # Ranks exit together; if only one did, the signal came before the process group existed.
            self._deadline = min(self._deadline, now + STRAGGLER_GRACE_S)

        if not self.attempt.running:
            self._all_exited(now)

    def _all_exited(self, now: float) -> None:
        """End the job, or begin the next attempt: after a resize, or with a new node."""
        if not self.attempt.all_clean:
            self._fail(self.attempt.root_cause(), now)
        elif not self.attempt.any_preempted:
            self._end(JobEnd(0))
        elif self._preempt_signal:
            self._end_preempted()
        else:
            self._gather(now)

    def zygote_lost(self, node: int, event: ZygoteLost, now: float) -> None:
        """The process that forks a node's ranks has died. Between two attempts that is not a failure."""
        first = min(self.attempt.ranks_on(node), default=-1)
        failure = Failure(first, self.cluster.nodes[node].host, time.time(), Kind.ZYGOTE, event.why)

        if event.hopeless and self.job_phase is not JobPhase.OVER:
            self._planned_end = JobEnd(1, failure)
            self._report(failure, "not restarted: it would end the same way")
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
            self.settings = Settings(**beat.settings)
            self.attempt.watchdog.limits = self.settings.hang

    def check_for_hangs(self, now: float) -> None:
        """Ask for stacks if no rank advances; called about once a second."""
        # After a failure the other ranks stand still. That is not a hang, and the cause will be reported soon.
        if not self.attempt.all_clean:
            return

        # Ranks that do not move will not save either.
        if self.job_phase is JobPhase.PREEMPT:
            if still := self.attempt.watchdog.stands_still(self.attempt.running, self._preempted_at, now):
                self._fail(self.attempt.overdue(still), now, nothing_to_save=not any(view.steps_done for view in still))
            return

        if self.job_phase is not JobPhase.RUN:
            return

        if self.attempt.watchdog.look(self.attempt.running, now):
            self._enter(JobPhase.ASK, now + NODES_STACKS_S)
            self._unanswered = self._nodes_of_attempt()
            self._send_all(CollectStacks(self.attempt.number))

    def stacks(self, node: int, event: Stacks, now: float) -> None:
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
        if failure := self.attempt.watchdog.verdict():
            self._fail(failure, now)
        elif remark := self.attempt.watchdog.remark():
            # Long before the limit is reached, the screen says where the ranks are.
            self._say(remark)

    # ---- preemption and resizing ----

    def preempt_requested(self, signal: str, now: float) -> None:
        """A signal asks the job to save and exit. After a second Ctrl-C the ranks are killed at once."""
        # Schedulers send SIGTERM more than once, so a second SIGTERM means nothing new.
        at_once = self._sigint_seen and signal == "SIGINT"
        self._sigint_seen |= signal == "SIGINT"
        self._preempt_signal = self._preempt_signal or signal

        match self.job_phase:
            case JobPhase.GATHER:
                self._end_preempted()
            case JobPhase.RUN | JobPhase.ASK | JobPhase.PREEMPT if at_once:
                self._say("stopped at once")
                self._planned_end = JobEnd(self._preempted_code)
                self._kill_ranks(now)
            case JobPhase.RUN | JobPhase.ASK:
                self._say(f"{signal}: asking {plural(len(self.attempt.ranks), 'rank')} to save and stop")
                self._preempt(now)
            case _:
                pass  # the job is ending anyway

    def resize(self, ranks: int, now: float) -> None:
        """Continue with another number of ranks, after a save."""
        bounds = self.cluster.rank_bounds
        if not bounds.least <= ranks <= bounds.most:
            self._say(f"not resized to {plural(ranks, 'rank')}: --nproc allows {bounds} in all")
            return

        # The same number may be divided over the nodes in another way; that waits for the next attempt.
        before = self.cluster.world_size
        running = Counter(node for node, _ in self.attempt.ranks.values())
        self.cluster.resize(ranks)
        if before == ranks:
            return

        # Before the first attempt there is no size that is known to work.
        if running:
            self._before_resize = (self.attempt.number, running)

        self._say(f"from {before} to {plural(ranks, 'rank')}: asking the ranks to save")
        self._log({"event": "resize", "from": before, "to": ranks})

        # Nodes can import torch for the new ranks while the current ranks still save.
        self._commands += [Send(node, Prepare(count)) for node, count in self.cluster.wanted.items()]
        if self.job_phase in (JobPhase.RUN, JobPhase.ASK):
            self._preempt(now)

    def _preempt(self, now: float) -> None:
        """Have the ranks save and exit; `tick` kills them when the grace period is over."""
        self._enter_preempt(now)
        self._send_all(Preempt(self.attempt.number))

    def _enter_preempt(self, now: float) -> None:
        self._enter(JobPhase.PREEMPT, now + self.settings.restart.grace)
        self._preempted_at = now

    @property
    def _preempted_code(self) -> int:
        return Preempted.code_of(self._preempt_signal)

    def _end_preempted(self) -> None:
        step = self.committed()
        saved = "stopped before anything was saved" if step is None else f"saved at step {step}"
        self._say(f"{saved}; to resume: {self.job.resume_command}")
        self._log({"event": "preempted", "signal": self._preempt_signal, "step": step})
        self._end(JobEnd(self._preempted_code))

    # ---- time ----

    def tick(self, now: float) -> None:
        """Start an attempt that is ready and act on the deadline of the current phase."""
        if self.job_phase is JobPhase.GATHER and now >= self._not_before and not self._end_if_planned():
            self._start_if_ready(now)

        if now > self._start_by and self.job_phase in ACTIVE:
            for node in sorted(self._not_started & self.cluster.nodes.keys()):
                self.gone(node, f"was dropped: it has not started its ranks within {START_S:.0f} s", now)

        if now < self._deadline:
            return

        # The deadline of this phase has passed.
        match self.job_phase:
            case JobPhase.GATHER:
                problem = f"only {plural(len(self.cluster.nodes), 'node')} came within {GATHER_S:.0f} s"
                self._say(f"{problem}; {self.cluster.bounds.least} are needed. {self._how_to_continue}")
                failure = Failure(-1, "", time.time(), Kind.NODE, problem)
                self._end(JobEnd(self._code_after(failure), failure))

            case JobPhase.ASK:
                self._judge_hang(now)

            case JobPhase.KILL:
                # Continue without the nodes that could not kill their ranks.
                for node in sorted(self._unanswered):
                    self.gone(node, f"vanished: its ranks did not end within {NODES_KILL_S:.0f} s", now)

            case JobPhase.PREEMPT if self.attempt.all_clean:
                # Ranks that were asked to save take too long.
                self._fail(self.attempt.overdue(), now)

            case JobPhase.RUN | JobPhase.PREEMPT:
                # A rank raised. If a node has gone quiet, its loss may be the cause: wait for that report.
                beats = [self._last_beat.get(node, now) for node in self._nodes_of_attempt()]
                if now - min(beats, default=now) <= QUIET_S:
                    self._fail(self.attempt.root_cause(), now)

    # ---- failures ----

    def _fail(self, failure: Failure, now: float, nothing_to_save: bool = False) -> None:
        """Report the failure, decide what follows and kill all ranks.

        `nothing_to_save`: the ranks were asked to stop, and were killed before their first step.
        """
        if not self._returned_to_size(failure):
            self._decide(failure, now, nothing_to_save)

        self._kill_ranks(now)

    def _decide(self, failure: Failure, now: float, nothing_to_save: bool = False) -> None:
        """Report the failure, and decide whether another attempt follows."""
        saved = self.committed()
        if failure.for_user:
            # The same program would run into the same error, and the message already says what to do.
            self._planned_end = JobEnd(2, failure)
            self._report(failure)
        elif self._preempt_signal and (nothing_to_save or saved is not None or self.attempt.any_preempted):
            # The job was stopping anyway, and nothing is lost: not a failure.
            self._report(failure, "the job was asked to stop: not restarted")
        elif reason := self._refusal(failure, saved, now):
            self._plan_end(failure, reason, saved)
        else:
            self._plan_restart(failure, saved, now)

    def _returned_to_size(self, failure: Failure) -> bool:
        """Return to the size before a resize if the new size may be at fault. Returns whether it does.

        That is so if the first attempt after a resize fails, by itself, before it has saved anything.
        """
        if self._before_resize is None or self._preempt_signal or not (failure.for_user or failure.likely_to_repeat):
            return False

        last, counts = self._before_resize
        same_nodes = counts.keys() == self.cluster.wanted.keys()
        if self.attempt.number != last + 1 or not same_nodes or self.committed() != self.attempt.started_from:
            return False

        self._before_resize = None
        refused = self.cluster.world_size
        self.cluster.wanted = dict(counts)
        world_size = self.cluster.world_size
        self._report(failure)
        self._say(f"not resized to {plural(refused, 'rank')}: continuing with {plural(world_size, 'rank')}")
        self._log({"event": "resize", "from": refused, "to": world_size})
        return True

    def _refusal(self, failure: Failure, saved: int | None, now: float) -> str | None:
        if self._preempt_signal:
            return f"the job was asked to stop ({self._preempt_signal})"

        # After a takeover the other nodes have yet to join.
        too_few = self.cluster.too_few if self._attempt_ran_here else None
        progress = saved != self.attempt.started_from
        return too_few or self.restarts.refusal(failure, progress, self.settings, now)

    def _plan_end(self, failure: Failure, reason: str, saved: int | None) -> None:
        """Announce that the job is not restarted. It ends when all ranks of this attempt are gone."""
        # With nothing saved, the same error would most likely recur, so no command is suggested.
        hint = "" if saved is None and failure.likely_to_repeat else f". {self._how_to_continue}"
        self._planned_end = JobEnd(self._code_after(failure), failure)
        self._report(failure, f"not restarted: {reason}{hint}")

    def _code_after(self, failure: Failure) -> int:
        """Return the exit code of a job that a failure ends."""
        # A job that had its nodes, and has too few now, asks to be started again: the cluster replaces machines.
        lost_nodes = failure.kind == Kind.NODE and self.attempt.number >= 0 and self.cluster.too_few
        return Preempted.CODE if lost_nodes else 1

    def _plan_restart(self, failure: Failure, saved: int | None, now: float) -> None:
        """Count the restart and announce it. The next attempt starts when all ranks of this one are gone."""
        node, local_rank = self.attempt.ranks.get(failure.rank, (None, None))
        slot = None if local_rank is None else (failure.host, local_rank)
        if self.restarts.note(failure, slot, saved, now) and node is not None:
            self.cluster.shrink(node)

        self._restart_to_log = True

        # After a takeover the other nodes have yet to join, so the number of ranks is not known.
        what = plural(self.cluster.world_size, "rank") if self._attempt_ran_here else "the nodes that are left"
        count = "not counted as a restart" if failure.kind == SMALLER else self._budget
        again = f"restarting {what} from {_source(saved)} ({count})"

        # Slow work that is taken for a hang would end every attempt at the same step.
        if failure.kind == Kind.HANG and self.attempt.watchdog.reached_a_limit:
            self.restarts.hang_places[failure.step, failure.phase] += 1
            again += f"; with a higher limit for step {failure.step}, phase {failure.phase}"

        self._report(failure, again)

    @property
    def _attempt_ran_here(self) -> bool:
        """Whether this coordinator has started an attempt; False until then, after a takeover too."""
        return bool(self.attempt.ranks)

    @property
    def _how_to_continue(self) -> str:
        how = "start over" if self.committed() is None else "resume"
        return f"To {how}: {self.job.resume_command}"

    @property
    def _budget(self) -> str:
        return f"restart {len(self.restarts.recent)} of {self.settings.restart.per_hour} in an hour"

    def _report(self, failure: Failure, verdict: str = "") -> None:
        lines = [failure.text()]
        if not failure.for_user:
            others = self.attempt.others_than(failure) if self.job_phase in ACTIVE else 0
            victims = f"{plural(others, 'other rank was', 'other ranks were')} stopped." if others else ""

            # Rank 0 wrote to the terminal: its output is on the screen already.
            path = self.job.run_dir / "logs" / f"rank-{failure.rank}.log"
            log = f"Log of rank {failure.rank}: {path}" if failure.rank > 0 else ""
            lines += [f"  {text}" for text in (f"{victims} {log}".strip(), verdict) if text]

        self._commands.append(Announce("\n".join(lines)))

        # Events hold no log lines: the log itself stays in the run's folder.
        fields = {name: value for name, value in vars(failure).items() if name != "log"}
        self._log({"event": "failure", "attempt": self.attempt.number, **fields})

    def _kill_ranks(self, now: float) -> None:
        """Have every node kill its ranks. When they are gone, `_continue_if_gone` ends the job or gathers the nodes."""
        self._enter(JobPhase.KILL, now + NODES_KILL_S)
        self._unanswered = self._nodes_of_attempt()
        self._send_all(Kill(self.attempt.number))
        self._continue_if_gone(now)

    def ranks_gone(self, node: int, attempt: int, now: float) -> None:
        if attempt == self.attempt.number and self.job_phase is JobPhase.KILL:
            self._unanswered.discard(node)
            self._continue_if_gone(now)

    def _continue_if_gone(self, now: float) -> None:
        gone = self.job_phase is JobPhase.KILL and not self._unanswered
        if gone and not self._end_if_planned():
            self._gather(now)

    def _end_if_planned(self) -> bool:
        """End the job if that is already decided. Returns whether it was."""
        if self._planned_end is not None:
            self._end(self._planned_end)
        elif self._preempt_signal:
            self._end_preempted()

        return self.job_phase is JobPhase.OVER

    def _end(self, ending: JobEnd) -> None:
        self._enter(JobPhase.OVER)
        self._commands.append(replace(ending, restarts=self.restarts.total))

    # ---- commands ----

    def _nodes_of_attempt(self) -> set[int]:
        return {node for node, _ in self.attempt.ranks.values() if node in self.cluster.nodes}

    def _send_all(self, message: Message) -> None:
        self._commands += [Send(node, message) for node in sorted(self._nodes_of_attempt())]

    def _say(self, text: str) -> None:
        self._commands.append(Announce(f"lockstep: {text}"))

    def _log(self, event: dict[str, Any]) -> None:
        self._commands.append(LogEvent(event))


def _source(saved: int | None) -> str:
    return "the beginning" if saved is None else f"the checkpoint of step {saved}"
