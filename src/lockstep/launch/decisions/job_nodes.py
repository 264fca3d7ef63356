"""The nodes of a job: which have joined, and how many ranks each should run.

Three words for nodes that do not take part:

    refused      it asked to join and may not, for example because its command differs; its launcher prints why and ends
    lost         it belonged to the job, and does not any more, whatever the reason; it may join again
    dismissed    lost, and its launcher ends, because it cannot import the program or set up its ranks
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.errors import plural
from lockstep.launch.failure import Failure, LauncherFailure
from lockstep.launch.job import COORDINATOR, Bounds
from lockstep.launch.restarts import Dismissals

# How long the set of nodes must stay the same before an attempt starts with fewer nodes than may join; and after how
# long it starts in any case, if nodes keep coming: the rest can join later.
SETTLE_S = 3.0
MOST_SETTLE_S = 30.0


@dataclass(frozen=True)
class Node:
    """A node is one machine of the job. `nproc` bounds the ranks that it can run."""

    number: int
    host: str
    nproc: Bounds


class JobNodes:
    """The nodes of the job now, and how many ranks each should run in the next attempt."""

    def __init__(self, bounds: Bounds, now: float, dismissals: Dismissals):
        self.bounds = bounds  # --nnodes
        self.dismissals = dismissals
        self.joined: dict[int, Node] = {}

        # Node -> ranks of the next attempt.
        self.ranks_per_node: dict[int, int] = {}

        # Node -> when its last heartbeat came.
        self.last_heartbeats: dict[int, float] = {}

        # When a node last joined or was lost, and since when the job has had enough nodes and waits for more.
        self._changed = now
        self._enough_since = math.inf

    def add(self, node: Node, now: float) -> None:
        """Add a node. It runs as many ranks as its command says, until a resize."""
        self.joined[node.number] = node
        self.ranks_per_node[node.number] = node.nproc.initial
        self._changed = now
        if not self.missing:
            self._enough_since = min(self._enough_since, now)

    def loss_of(self, number: int, why: str) -> Failure:
        """Return the loss of a node as a failure. `why` is a clause: "no heartbeat for 5 s"."""
        host = self.joined[number].host
        return Failure.by_launcher(
            LauncherFailure.NODE, f"node {number} ({host}) is lost: {why}", host=host, node=number
        )

    def remove(self, number: int, now: float) -> None:
        """Remove a node that is lost."""
        del self.joined[number]
        del self.ranks_per_node[number]
        self.last_heartbeats.pop(number, None)
        self._changed = now
        if self.missing:
            self._enough_since = math.inf

    @property
    def world_size(self) -> int:
        """How many ranks the next attempt has."""
        return sum(self.ranks_per_node.values())

    @property
    def full(self) -> bool:
        """Whether no other node may join."""
        return len(self.joined) >= self.bounds.most

    @property
    def missing(self) -> int:
        """How many more nodes the job needs."""
        return max(self.bounds.least - len(self.joined), 0)

    def can_spare(self, number: int | None) -> bool:
        """Return whether the job could go on without this node, if it is one of its nodes."""
        return number in self.joined and number != COORDINATOR and len(self.joined) > self.bounds.least

    @property
    def shortage(self) -> str | None:
        """How many nodes are left and needed, in words; None if there are enough."""
        left = plural(len(self.joined), "node")
        return f"{left} left, and {self.bounds.least} needed" if self.missing else None

    def begin_to_settle(self, now: float) -> None:
        """Begin the wait for more nodes, because an attempt is over."""
        if not self.missing:
            self._enough_since = now

    @property
    def ready_at(self) -> float:
        """When an attempt can start: at once if the job is full, or when it is large enough and has waited for more."""
        if self.full:
            return -math.inf

        if self.missing:
            return math.inf

        return min(self._changed + SETTLE_S, self._enough_since + MOST_SETTLE_S)

    def longest_silence(self, numbers: Iterable[int], now: float) -> float:
        """Return for how long the quietest of these nodes has sent no heartbeat. A node without one does not count."""
        beats = [self.last_heartbeats.get(number, now) for number in numbers]
        return now - min(beats, default=now)

    @property
    def rank_bounds(self) -> Bounds:
        """How many ranks the nodes that are here can run in all."""
        nodes = self.joined.values()
        return Bounds(sum(node.nproc.least for node in nodes), sum(node.nproc.most for node in nodes))

    def resize(self, ranks: int) -> None:
        """Divide this many ranks over the nodes, for the next attempt."""
        self.ranks_per_node = divide(ranks, {number: node.nproc for number, node in sorted(self.joined.items())})


def divide(ranks: int, bounds: dict[int, Bounds]) -> dict[int, int]:
    """Divide this many ranks over the nodes, as evenly as their bounds allow; of equal nodes the first gets more."""
    shares = {number: allowed.least for number, allowed in bounds.items()}

    # The nodes that have room, the one with the fewest ranks first; of equal ones the first in `bounds`.
    room = []
    for index, number in enumerate(bounds):
        if bounds[number].most > shares[number]:
            room.append((shares[number], index, number))

    heapq.heapify(room)

    # One rank at a time, to the node with the fewest.
    for _ in range(ranks - sum(shares.values())):
        share, index, number = heapq.heappop(room)
        shares[number] = share + 1

        if share + 1 < bounds[number].most:
            heapq.heappush(room, (share + 1, index, number))

    return shares
