"""What the screens say while the job waits for nodes."""

from __future__ import annotations

from lockstep.errors import plural
from lockstep.launch.decisions.cluster import Cluster
from lockstep.launch.decisions.outbox import Outbox

# How long the job waits before it says which nodes are missing, and between two lines about that.
SAY_MISSING_S = 3.0


class MissingNodes:
    """Says how many nodes are missing: once, and again when nodes have joined or left. `join` is where they meet."""

    def __init__(self, cluster: Cluster, join: str | None, now: float):
        self._cluster = cluster
        self._join = join

        # How many nodes were missing when that was last said, and when it may be said next.
        self._said = 0
        self._say_at = now + SAY_MISSING_S

    def due(self, now: float) -> bool:
        return now >= self._say_at and self._cluster.missing != self._said

    def say(self, outbox: Outbox, deadline: float, now: float) -> None:
        """Say how many nodes are missing, if any are; the job waits for them until the deadline."""
        missing = self._cluster.missing
        self._said = missing
        self._say_at = now + SAY_MISSING_S
        if missing:
            left = deadline - now
            time_left = f"{left / 60:.0f} minutes" if left >= 90 else f"{left:.0f} s"
            limit = f"of {self._cluster.bounds.least}; giving up after {time_left}"
            outbox.say(f"waiting for {plural(missing, 'more node')} at {self._join} ({limit})")
