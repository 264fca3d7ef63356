"""The state of a job that all decisions share: its status, its nodes, its ranks, and the commands to carry out."""

from __future__ import annotations

import math

from lockstep.launch.decisions.attempt import Attempt
from lockstep.launch.decisions.commands import NodeNews, Outbox
from lockstep.launch.decisions.job_nodes import JobNodes
from lockstep.launch.decisions.recovery import AttemptFacts, Decision, End, EndPreempted, Situation
from lockstep.launch.decisions.status import ACTIVE, TRANSITIONS, JobStatus
from lockstep.launch.job import Job, LauncherSettings
from lockstep.launch.times import JOIN_S
from lockstep.launch.wire.messages import CollectStacks, CoordinatorState, JobEnd, Kill, SaveAndExit
from lockstep.run_folder.checkpoint_facts import CheckpointFacts
from lockstep.run_folder.names import LOGS


class JobState:
    """The state of a job. `inherited` is the last state of a lost coordinator, or an empty one."""

    def __init__(self, job: Job, checkpoints: CheckpointFacts, now: float, inherited: CoordinatorState):
        self.job = job
        self.settings = LauncherSettings(**inherited.settings)

        # The nodes.
        self.nodes = JobNodes(job.nnodes, now)

        # The newest attempt that this coordinator has started, None if it has started none; and the number of the job's
        # newest attempt, which a lost coordinator may have started.
        self.attempt: Attempt | None = None
        self.last_attempt_number = inherited.attempt

        # The last attempt before a resize: if the one after it fails, the job returns to its size.
        self.before_resize: Attempt | None = None

        # The first signal that asks the whole job to end, perhaps before a takeover. From then on no attempt starts.
        self.preempt_signal = inherited.preempt_signal

        # The restarts so far, the nodes that were dismissed, and what the checkpoints show.
        ahead = now - inherited.clock
        self.restarts = inherited.restarts.shift_clock(ahead)
        self.dismissals = inherited.dismissals.shift_clock(ahead)
        self.note_checkpoints(checkpoints)

        self.outbox = Outbox(job.run_dir / LOGS)
        self.node_news = NodeNews(self.outbox)

        # How long the status may last. RUN, which the watchdog covers, has no deadline, nor has OVER.
        self.status = JobStatus.JOIN
        self.deadline = now + JOIN_S

        # The decision about what follows when all ranks are gone: `AttemptEnd` sets it, `NextAttempt` carries it
        # out. None before the first attempt, and while nothing has happened.
        self.decided: Decision | None = None
        if inherited.ending:
            self.decided = End(inherited.ending, "that was decided before the coordinator was lost")

    @property
    def decided_end(self) -> End | EndPreempted | None:
        """How the job ends when all ranks are gone; None if no end is decided."""
        return self.decided if isinstance(self.decided, End | EndPreempted) else None

    @property
    def end_is_decided(self) -> bool:
        """Whether the job ends when all ranks are gone: no other attempt starts."""
        return self.decided_end is not None

    @property
    def final_end(self) -> End | None:
        """The decided end, if it has an exit code of its own, which no later signal changes; None otherwise.

        A job that ends as preempted has none: its code is that of the signal.
        """
        return self.decided if isinstance(self.decided, End) else None

    def note_checkpoints(self, checkpoints: CheckpointFacts) -> None:
        """Note what the checkpoints show now."""
        self.checkpoints = checkpoints
        self.restarts.note_checkpoint(checkpoints.newest_step)
        if self.attempt is not None:
            self.attempt.note_newest_step(checkpoints.newest_step)

    def enter(self, status: JobStatus, deadline: float = math.inf) -> None:
        """Change the status, which may last until `deadline`."""
        assert status in TRANSITIONS[self.status], f"{status.name} cannot follow {self.status.name}"
        self.status = status
        self.deadline = deadline

    def shorten_deadline(self, deadline: float) -> None:
        """Let the status last until then at most."""
        self.deadline = min(self.deadline, deadline)

    def take_deadline(self, now: float) -> bool:
        """Return whether the deadline has passed. It is acted on once."""
        if now < self.deadline:
            return False

        self.deadline = math.inf
        return True

    def end(self, ending: JobEnd) -> None:
        """End the job."""
        self.enter(JobStatus.OVER)
        self.outbox.put(ending)

    # ---- the attempt ----

    @property
    def active_attempt(self) -> Attempt | None:
        """The attempt whose ranks run now, None if none do."""
        return self.attempt if self.status in ACTIVE else None

    @property
    def healthy_attempt(self) -> Attempt | None:
        """The attempt whose ranks run now, None if none do, or if one of them has failed already."""
        attempt = self.active_attempt
        return attempt if attempt is not None and not attempt.has_failed else None

    def has_running(self, number: int | None) -> bool:
        """Return whether the ranks of the attempt with this number run now."""
        return self.active_attempt is not None and self.active_attempt.number == number

    @property
    def nodes_of_attempt(self) -> set[int]:
        """The nodes that have ranks of this attempt, and still belong to the job."""
        return self.attempt.nodes & self.nodes.joined.keys() if self.attempt is not None else set()

    @property
    def first_after_resize(self) -> bool:
        """Whether the newest attempt is the first one after a resize, on the same nodes as before it."""
        before = self.before_resize
        if before is None or self.last_attempt_number != before.number + 1:
            return False

        return before.counts.keys() == self.nodes.ranks_per_node.keys()

    def order(self, message: SaveAndExit | Kill | CollectStacks) -> None:
        """Send an order about this attempt to all nodes that have ranks of it."""
        self.outbox.send(self.nodes_of_attempt, message)

    # ---- what a decision depends on ----

    def situation(self, now: float) -> Situation:
        """Return the facts on which a decision depends."""
        newest_step = self.checkpoints.newest_step

        return Situation(
            settings=self.settings,
            newest_step=newest_step,
            attempt=self.attempt.facts(newest_step) if self.attempt is not None else AttemptFacts(),
            recent_restarts=self.restarts.recent(now),
            restarts_in_a_row=self.restarts.in_a_row,
            shortage=self.shortage,
            preempt_signal=self.preempt_signal,
            first_after_resize=self.first_after_resize,
        )

    @property
    def shortage(self) -> str | None:
        """How many nodes are missing for another attempt, in words; None if there are enough."""
        # Until this coordinator has started an attempt, also after a takeover, the other nodes have yet to join.
        return self.nodes.shortage if self.attempt is not None else None

    # ---- in words ----

    @property
    def where_to_resume(self) -> str:
        """Where the next attempt begins: "the beginning", or a checkpoint."""
        step = self.checkpoints.newest_step
        return "the beginning" if step is None else f"the checkpoint of step {step}"

    @property
    def how_to_resume(self) -> str:
        """The command to type after the end of the job, in a sentence."""
        return f"To resume from {self.where_to_resume}: {self.job.resume_command}"
