"""The statuses of a job, and what may follow each of them."""

from __future__ import annotations

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
