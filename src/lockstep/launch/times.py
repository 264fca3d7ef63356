"""The times that several packages of the launcher share, or that must fit together.

`tests/unit/launch/test_times.py` compares these with the times that concern one module only.
"""

from __future__ import annotations

# Seconds between two heartbeats of a node, and between two renewals of the coordinator's lease.
HEARTBEAT_S = 1.0

# A node that sends nothing for this long is lost.
LOST_AFTER_S = 5.0

# What may keep a launcher from sending its heartbeat. The last one may be HEARTBEAT_S old when such a wait begins. Two
# waits do not add up: `Coordinator` sends its heartbeat in between, if it is due.

# How long ranks have to write their stacks, and then their collectives, while their agent waits.
RANKS_STACKS_S = 1.5
COLLECTIVES_S = 1.5

# How long the coordinator's loop waits until the thread of `FolderWatch` has looked at the run folder.
SCAN_S = 3.0

# How long an agent waits until its zygote takes a request, which a suspended one never does, and for the end of a
# zygote that is closed. An agent may close one and send a request to the next.
ZYGOTE_SEND_S = 3.0
ZYGOTE_END_S = 0.9

assert HEARTBEAT_S + RANKS_STACKS_S + COLLECTIVES_S < LOST_AFTER_S, "a node that collects stacks would be lost"
assert HEARTBEAT_S + SCAN_S < LOST_AFTER_S, "a coordinator whose disk does not answer would be lost"
assert HEARTBEAT_S + ZYGOTE_END_S + ZYGOTE_SEND_S < LOST_AFTER_S, "a node whose zygote is suspended would be lost"

# Some waits have no limit, because the system offers none: a write to a terminal that was stopped with Ctrl-S; the logs
# of ranks, in the run folder, whose disk may not answer when their agent starts them or looks why they have ended; the
# end of a zygote that was killed while it waits for such a disk. If one of these takes longer than LOST_AFTER_S, the
# other nodes go on without the node, and if it is the coordinator's, one of them takes over.

# A coordinator's loop without an iteration for this long was halted, or was held up by one of these: the other nodes
# may have lost it, and one of them may have taken over. It must look before they can have done so.
STALLED_LOOP_S = 2.0

assert STALLED_LOOP_S < LOST_AFTER_S, "a coordinator that was superseded would act"

HOUR_S = 3600.0


def within_last_hour(times: list[float], now: float) -> list[float]:
    """Return the times that are at most an hour ago."""
    return [moment for moment in times if now - moment <= HOUR_S]
