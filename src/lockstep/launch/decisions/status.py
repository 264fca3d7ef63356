"""The statuses of a job, what may follow each of them, and how long they may last."""

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
        JobStatus.RUN,  # all nodes that may join are there; or enough, and none came for 3 s, or 30 s are over
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
        JobStatus.OVER,  # ranks of the coordinating node do not die
    },
    JobStatus.OVER: set(),
}

# Ranks are running.
ACTIVE = (JobStatus.RUN, JobStatus.SAVE_AND_EXIT)


# ---- how long they last ----

# How long the job waits for its nodes.
JOIN_S = 300.0

# How long the other ranks may take to exit after the first one that was asked to.
OTHER_SAVES_S = 20.0

# How long the coordinator waits for nodes to say that their killed ranks are gone. A process with much memory takes a
# while to die; a node that is lost altogether is noticed by its missing heartbeats.
NODES_KILL_S = 30.0

# How long a node may take to confirm that it starts its ranks, which happens before they import anything.
START_S = 10.0
