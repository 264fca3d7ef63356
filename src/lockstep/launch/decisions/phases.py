"""The phases of a job, the transitions between them, and how long each may last.

A rank has phases as well, which are others: its heartbeat shows them (`lockstep.runtime.heartbeat`).

    JOIN --all nodes that may join, or enough nodes and no new one for 3 s--> RUN
    JOIN --too few nodes in time--> OVER
    JOIN --too few nodes are left after an attempt--> OVER
    JOIN --a signal, a zygote that cannot import, or an end that was planned at the takeover--> OVER
    RUN, COLLECT_STACKS, PREEMPT --all ranks have finished--> OVER
    RUN --no rank advances--> COLLECT_STACKS --stacks have arrived, or time is up--> RUN, or KILL if it is a hang
    COLLECT_STACKS --a rank raises--> RUN, with a deadline for an earlier failure to arrive
    COLLECT_STACKS --a rank dies while rank 0 commits a checkpoint--> RUN, with a deadline for the commit
    RUN, COLLECT_STACKS --signal, resize or new node--> PREEMPT --all ranks have saved--> OVER, or JOIN
    RUN, COLLECT_STACKS --a rank has received a signal itself--> PREEMPT
    RUN, COLLECT_STACKS, PREEMPT --a failure, or a second Ctrl-C--> KILL
    RUN, COLLECT_STACKS, PREEMPT, KILL --a zygote cannot import--> KILL
    KILL --all ranks are gone, or their nodes are given up--> JOIN (the next attempt) or OVER
    KILL --ranks of the coordinating node do not die--> OVER
"""

from __future__ import annotations

from enum import Enum


class JobPhase(Enum):
    """What the job is doing, or waiting for."""

    JOIN = "waiting for nodes"
    RUN = "running"
    COLLECT_STACKS = "waiting for stacks"
    PREEMPT = "waiting for ranks to save and exit"
    KILL = "waiting for killed ranks to be gone"
    OVER = "over"


# Phases in which ranks are running.
ACTIVE = (JobPhase.RUN, JobPhase.COLLECT_STACKS, JobPhase.PREEMPT)


# ---- how long they last ----

# How long the job waits for its nodes.
JOIN_S = 300.0

# After an exception, how long to wait for the exit of a peer that may have died first.
PEER_WAIT_S = 1.0

# The same wait after an exception that only says that a peer is gone: a large process takes a while to die.
LOST_PEER_WAIT_S = 5.0

# After that wait, or after the death of another rank, how long rank 0 may take to commit a checkpoint that all ranks
# have written.
COMMIT_S = 3.0

# How long the other ranks may take to exit after the first one that was preempted.
STRAGGLER_GRACE_S = 20.0

# A node sends a heartbeat every second. If none came for this long, the node is probably lost.
QUIET_S = 2.0

# How long the coordinator waits for nodes to say that their killed ranks are gone. A process with much memory takes a
# while to die; a node that is lost altogether is noticed by its missing heartbeats.
NODES_KILL_S = 30.0

# How long a node may take to confirm that it starts its ranks, which happens before they import anything.
START_S = 10.0

# How long the coordinator waits for the nodes' stacks.
NODES_STACKS_S = 5.0

# How long a node that takes over waits before it starts ranks. Rank 0 of the previous coordinator checks once a second
# whether its coordinator was superseded, and ends if so. The other nodes join the new coordinator meanwhile.
FENCE_S = 3.0
