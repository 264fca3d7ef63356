"""Limits of time that several packages of the launcher share, or that must fit together.

`tests/unit/launch/test_times.py` compares these with the limits that concern one module only.
"""

from __future__ import annotations

# Seconds between two heartbeats of a node, and between two renewals of the coordinator's lease.
HEARTBEAT_S = 1.0

# A node that sends nothing for this long is lost.
LOST_AFTER_S = 5.0

# What may keep a launcher from sending its heartbeat, one at a time: `Coordinator` sends its own in between if it is
# due. The last one may be HEARTBEAT_S old when the wait begins. Two waits have no limit: a terminal stopped with
# Ctrl-S, and the logs of ranks that start, on a disk that does not answer. Then another node takes over.

# How long ranks have to write their stacks, and then their collectives, while their agent waits.
RANKS_STACKS_S = 1.5
COLLECTIVES_S = 1.5

# How long the coordinator's loop waits for a look at the checkpoints that the thread of `FolderWatch` has begun.
LOOK_S = 3.0

assert HEARTBEAT_S + RANKS_STACKS_S + COLLECTIVES_S < LOST_AFTER_S, "a node that collects stacks would be lost"
assert HEARTBEAT_S + LOOK_S < LOST_AFTER_S, "a coordinator whose disk does not answer would be lost"

# A coordinator's loop without an iteration for this long was halted, or was held up by one of these: the other nodes
# may have lost it, and one of them may have taken over. It must look before they can have done so.
OVERDUE_ITERATION_S = 2.0

assert OVERDUE_ITERATION_S < LOST_AFTER_S, "a coordinator that was superseded would act"

HOUR_S = 3600.0


def within_last_hour(times: list[float], now: float) -> list[float]:
    """Return the times that are at most an hour ago."""
    return [moment for moment in times if now - moment <= HOUR_S]
