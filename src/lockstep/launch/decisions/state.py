"""The state of a job that all decisions share: its phase, its nodes, its ranks, and the commands to carry out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from lockstep.launch.decisions.attempt import Attempt
from lockstep.launch.decisions.cluster import Cluster
from lockstep.launch.decisions.commands import NodeNews, Outbox
from lockstep.launch.decisions.phases import JOIN_S, JobPhase
from lockstep.launch.decisions.recovery import Recovery
from lockstep.launch.decisions.settings import Settings
from lockstep.launch.hangs.watchdog import Watchdog
from lockstep.launch.job import Job
from lockstep.launch.wire.messages import CollectStacks, CoordinatorState, JobEnd, Kill, Preempt


class JobState:
    """The state of a job. `latest_step` returns the step of the newest checkpoint.

    `commit_is_near(ranks)` returns whether that many ranks have written a checkpoint that rank 0 has yet to commit.
    `inherited` is the last state of a lost coordinator, or an empty one.
    """

    def __init__(
        self,
        job: Job,
        latest_step: Callable[[], int | None],
        commit_is_near: Callable[[int], bool],
        now: float,
        inherited: CoordinatorState,
    ):
        self.job = job
        self.latest_step = latest_step
        self.commit_is_near = commit_is_near
        self.settings = Settings(**inherited.settings)

        # The nodes, the ranks that run now, and what is remembered from one attempt to the next.
        self.cluster = Cluster(job.nnodes, now)
        self.attempt = Attempt(inherited.attempt, {}, {}, None, Watchdog(self.settings.hang), started_here=False)
        self.recovery = Recovery(self.cluster, inherited, now)

        self.outbox = Outbox(job.run_dir / "logs")
        self.node_news = NodeNews(self.outbox)

        # RUN has a deadline only while an earlier failure or a commit may arrive; otherwise the watchdog covers it.
        # OVER has none.
        self.phase = JobPhase.JOIN
        self.deadline = now + JOIN_S

        # Nodes from which an answer is missing: stacks in COLLECT_STACKS, the end of their ranks in KILL.
        self.unanswered: set[int] = set()

    def enter(self, phase: JobPhase, deadline: float = math.inf, unanswered: Iterable[int] = ()) -> None:
        """Enter a phase. `unanswered` are the nodes from which it waits for an answer, until `deadline`."""
        self.phase = phase
        self.deadline = deadline
        self.unanswered = set(unanswered)

    def end(self, ending: JobEnd) -> None:
        """End the job. `ending` need not count the restarts."""
        self.enter(JobPhase.OVER)
        self.outbox.put(replace(ending, restarts=self.recovery.restarts.total))

    @property
    def nodes_of_attempt(self) -> set[int]:
        """The nodes that have ranks of this attempt, and still belong to the job."""
        return self.attempt.nodes & self.cluster.nodes.keys()

    def order(self, make: Callable[[int], Preempt | Kill | CollectStacks]) -> None:
        """Send an order to all nodes that have ranks of this attempt; `make` makes it from the attempt's number."""
        if self.attempt.number is not None:
            self.outbox.send(self.nodes_of_attempt, make(self.attempt.number))

    def how_to_continue(self, saved: int | None) -> str:
        """Return what to type after the end of the job. `saved` is the step of the newest checkpoint."""
        how = "start over" if saved is None else "resume"
        return f"To {how}: {self.job.resume_command}"
