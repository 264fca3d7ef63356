"""The statuses of a job, what may follow each of them, and the current one."""

from __future__ import annotations

import math
from enum import Enum


class JobStatus(Enum):
    """The status of a job: what it does, or waits for."""

    JOIN = "waiting for nodes"
    RUN = "running"
    SAVE_AND_EXIT = "waiting for ranks to save and exit"
    KILL = "waiting for killed ranks to be gone"
    OVER = "over"


# What may follow each status, and why.
TRANSITIONS: dict[JobStatus, set[JobStatus]] = {
    JobStatus.JOIN: {
        JobStatus.RUN,  # all nodes that may join are there; or enough, and the wait for more is over
        JobStatus.OVER,  # too few nodes came in time, or are left after an attempt; or the end was decided
    },
    JobStatus.RUN: {
        JobStatus.SAVE_AND_EXIT,  # a signal, a resize or a new node; or a rank has received a signal itself
        JobStatus.KILL,  # a failure, a hang too, or a second Ctrl-C
        JobStatus.OVER,  # all ranks have finished
    },
    JobStatus.SAVE_AND_EXIT: {
        JobStatus.JOIN,  # all ranks have saved, and the job goes on with other ranks
        JobStatus.KILL,  # a failure, a hang too, ranks that take too long, or a second Ctrl-C
        JobStatus.OVER,  # all ranks have saved, or finished
    },
    JobStatus.KILL: {
        JobStatus.KILL,  # the next attempt could not import the program
        JobStatus.JOIN,  # all ranks are gone, or their nodes are given up
        JobStatus.OVER,  # ranks of the coordinating node do not end
    },
    JobStatus.OVER: set(),
}

# Ranks are running.
ACTIVE = (JobStatus.RUN, JobStatus.SAVE_AND_EXIT)


class CurrentStatus:
    """The status of a job now, and until when it may last. A job begins in JOIN."""

    def __init__(self, deadline: float):
        self.current = JobStatus.JOIN

        # Infinite in RUN, which the watchdog covers, and in OVER.
        self.deadline = deadline

    def enter(self, status: JobStatus, deadline: float = math.inf) -> None:
        """Change the status, which may last until `deadline`."""
        assert status in TRANSITIONS[self.current], f"{status.name} cannot follow {self.current.name}"
        self.current = status
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
