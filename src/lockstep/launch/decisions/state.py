"""The state of a job that all decisions share: its status, its nodes, its ranks, and the commands to carry out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from lockstep.launch.decisions.attempt import Attempt
from lockstep.launch.decisions.commands import NodeNews, Outbox
from lockstep.launch.decisions.members import Members
from lockstep.launch.decisions.recovery import Decision, End
from lockstep.launch.decisions.status import ACTIVE, JOIN_S, TRANSITIONS, JobStatus
from lockstep.launch.hangs.watchdog import Watchdog
from lockstep.launch.job import Job, Settings
from lockstep.launch.wire.messages import CollectStacks, CoordinatorState, JobEnd, Kill, SaveAndExit
from lockstep.run_folder.names import LOGS
from lockstep.run_folder.run_dir import CheckpointFacts


class JobState:
    """The state of a job. `inherited` is the last state of a lost coordinator, or an empty one."""

    def __init__(self, job: Job, checkpoints: CheckpointFacts, now: float, inherited: CoordinatorState):
        self.job = job
        self.settings = Settings(**inherited.settings)

        # The nodes, the ranks that run now, and the restarts so far.
        self.members = Members(job.nnodes, now)
        self.attempt = Attempt(inherited.attempt, {}, {}, None, Watchdog(self.settings.hang), started_here=False)
        self.restarts = inherited.restarts.by_another_clock(now - inherited.clock)
        self.note_checkpoints(checkpoints)

        self.outbox = Outbox(job.run_dir / LOGS)
        self.node_news = NodeNews(self.outbox)

        # How long the status may last: `JobStateMachine._deadline_passed` says what follows. RUN, which the watchdog
        # covers, has no deadline, nor has OVER.
        self.status = JobStatus.JOIN
        self.deadline = now + JOIN_S

        # What was decided for the moment when all ranks are gone: `FailureHandler` sets it, `NextAttempt` carries it
        # out. None before the first attempt, and while nothing has happened.
        self.decided: Decision | None = None
        if ending := inherited.ending:
            self.decided = End(ending.code, "that was decided before the coordinator was lost", ending.failure)

        # Nodes that have not said yet, in KILL, that their ranks are gone.
        self.unanswered: set[int] = set()

    def note_checkpoints(self, checkpoints: CheckpointFacts) -> None:
        """Note what the checkpoints show now."""
        self.checkpoints = checkpoints
        self.restarts.note_checkpoint(checkpoints.newest)

    def enter(self, status: JobStatus, deadline: float = math.inf, unanswered: Iterable[int] = ()) -> None:
        """Change the status. `unanswered` are the nodes from which it awaits an answer, until `deadline`."""
        assert status in TRANSITIONS[self.status], f"{status.name} cannot follow {self.status.name}"
        self.status = status
        self.deadline = deadline
        self.unanswered = set(unanswered)

    def end(self, ending: JobEnd) -> None:
        """End the job."""
        self.enter(JobStatus.OVER)
        self.outbox.put(ending)

    @property
    def decided_end(self) -> JobEnd | None:
        """How the job ends when all ranks are gone, if it is decided that it has failed."""
        decided = self.decided
        return JobEnd(decided.code, decided.failure) if isinstance(decided, End) else None

    @property
    def nodes_of_attempt(self) -> set[int]:
        """The nodes that have ranks of this attempt, and still belong to the job."""
        return self.attempt.nodes & self.members.nodes.keys()

    def has_running(self, attempt: int | None) -> bool:
        """Return whether this is the current attempt, while its ranks run."""
        return attempt == self.attempt.number and self.status in ACTIVE

    def order(self, kind: type[SaveAndExit | Kill | CollectStacks], **fields: Any) -> None:
        """Send an order of this kind to all nodes that have ranks of this attempt."""
        if self.attempt.number is not None:
            self.outbox.send(self.nodes_of_attempt, kind(self.attempt.number, **fields))

    @property
    def where_to_resume(self) -> str:
        """Where the next attempt begins, in words."""
        newest = self.checkpoints.newest
        return "the beginning" if newest is None else f"the checkpoint of step {newest}"

    @property
    def how_to_resume(self) -> str:
        """What to type after the end of the job, as a sentence."""
        return f"To resume from {self.where_to_resume}: {self.job.resume_command}"
