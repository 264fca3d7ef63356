"""The times of the launcher that depend on each other, each after those that it depends on.

A time on which nothing else depends is where it is used. The table at the end says which times must be shorter than
others, and why; it is checked when this module is imported.
"""

from __future__ import annotations

# ---- the heartbeat, from which the others follow ----

# Between two heartbeats of a node, and between two renewals of the coordinator's lease. Rank 0 of several nodes looks
# as often whether its coordinator was superseded.
HEARTBEAT_S = 1.0

# A heartbeat is missing. After an exception of a rank, the coordinator waits for a node that is this late: it may be
# lost. A coordinator whose own loop is this late looks first whether it was superseded.
LATE_S = 2 * HEARTBEAT_S

# A node that sends nothing for this long is lost. Its stacks are not waited for any longer either.
LOST_AFTER_S = 5 * HEARTBEAT_S

# ---- what may keep a launcher from sending its heartbeat ----

# Two of these do not add up: `Coordinator` sends its heartbeat in between, if it is due. The last heartbeat may be
# HEARTBEAT_S old when one of them begins.

# How long an iteration of a launcher's loop waits for something to happen.
LOOP_S = 0.05

# How long the loop waits for the thread of `FolderWatch` to look at the run folder, and for a zygote to take a request,
# which a suspended one never does.
HELD_UP_S = 3.0

# The same time is divided between the stacks of the ranks and then their collectives.
RANKS_ANSWER_S = HELD_UP_S / 2

# How often a rank looks whether its collectives are wanted.
REQUEST_POLL_S = RANKS_ANSWER_S / 3

# How long an agent waits for the end of a zygote that it closes. It may close one and then send a request to the next.
ZYGOTE_END_S = 0.9

# How long a zygote tries to fork a rank if the system refuses: processes of an earlier attempt may be about to end.
FORK_S = 2.0

# Some waits have no limit, because the system offers none: a write to a terminal that was stopped with Ctrl-S; the logs
# of ranks, in the run folder, whose disk may not answer when their agent starts them or looks why they have ended; the
# end of a zygote that was killed while it waits for such a disk. If one of these takes longer than LOST_AFTER_S, the
# other nodes go on without the node, and if it is the coordinator's, one of them takes over.

# ---- from one attempt to the next ----

# How long the job waits for its nodes, and a node for a coordinator.
JOIN_S = 300.0

# How long a node may take to confirm that it starts its ranks, which happens before they import anything.
START_S = 2 * LOST_AFTER_S

# How long the other ranks may take to exit after the first one that was asked to save and exit.
OTHER_SAVES_S = 20.0

# How long the zygote may take to say that killed ranks have ended, before it is killed itself.
RANKS_KILL_S = 5.0

# How long the coordinator waits for nodes to say that their killed ranks are gone. A process with much memory takes a
# while to die; a node that is lost altogether is noticed by its missing heartbeats.
NODES_KILL_S = 30.0

# ---- from one coordinator to the next ----

# Each node waits this much longer than the node numbered below it before it takes over, so that they do not compete.
STAGGER_S = 2.0

# How long a node that has taken over waits before it starts ranks. The rank 0 of its predecessor ends meanwhile, and
# the other nodes join.
FENCE_S = 3.0

# How long a starting node waits for a sign of life: from the coordinator recorded in the run folder, and from whatever
# listens at its own port.
NO_ANSWER_S = 2 * LOST_AFTER_S

# How long a node that has received a signal tries to reach the successor of its coordinator, to send it the signal.
DELIVER_S = 20.0

# ---- what must be shorter than what ----

_SHORTER = {
    "a heartbeat is sent on time": (LOOP_S, HEARTBEAT_S),
    "a node that is late is not lost yet": (LATE_S, LOST_AFTER_S),
    "a node that was held up is not lost": (HEARTBEAT_S + HELD_UP_S, LOST_AFTER_S),
    "nor one that has closed a zygote before": (HEARTBEAT_S + ZYGOTE_END_S + HELD_UP_S, LOST_AFTER_S),
    "a zygote that tries to fork takes its requests in time": (FORK_S, HELD_UP_S),
    "a rank looks for requests before its answer is late": (REQUEST_POLL_S, RANKS_ANSWER_S),
    "a lost node is called lost, and not slow to start": (LOST_AFTER_S, START_S),
    "a zygote that stalls is killed before its node is given up": (RANKS_KILL_S, NODES_KILL_S),
    "rank 0 of a lost coordinator ends before the next attempt": (HEARTBEAT_S, FENCE_S),
    "a coordinator that lives is not taken for a dead one": (LOST_AFTER_S, NO_ANSWER_S),
    "a node takes over before a signal gives up": (LOST_AFTER_S + STAGGER_S, DELIVER_S),
}
for _why, (_short, _long) in _SHORTER.items():
    assert _short < _long, _why


# ---- limits per hour ----

HOUR_S = 3600.0


def within_last_hour(times: list[float], now: float) -> list[float]:
    """Return the times that are at most an hour ago."""
    return [moment for moment in times if now - moment <= HOUR_S]
