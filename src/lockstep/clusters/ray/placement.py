"""The nodes of a Ray cluster that a job has, and those that it may get: slots for actors, in placement groups.

Ray replaces lost bundles of a placement group. What it does not do is done here: a node that appears later gets a
placement group for itself, and a bundle on a node that Ray drains is given back if the job can go on without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.clusters.ray.cluster import (
    ActorHandle,
    Need,
    RayCluster,
    RayNode,
    RayUnavailable,
    describe,
    state_of,
    too_small,
)
from lockstep.errors import UserError, plural
from lockstep.launch.job import Bounds
from lockstep.launch.terminal import print_line

# What Ray has not given for so long, although it seemed to be free, is not waited for.
UNPLACED_S = 10.0


@dataclass(eq=False)
class Slot:
    """A place for one actor: a bundle of a placement group.

    It outlives its actor: after a failure another actor is made in the same bundle, after a pause that grows. Ray may
    move the bundle to another node meanwhile: `placed` is where it is now, `node` where the last actor was.
    """

    group: Any
    bundle: int
    since: float
    single_node: bool = False  # the group has this bundle only, on one node

    placed: str = ""  # the node where Ray has put the bundle
    actor: ActorHandle | None = None
    node: RayNode | None = None  # where the actor is
    began: float = 0.0  # when the actor was made
    heard: float = 0.0  # when it last answered
    tries: int = 0  # actors that have failed here, one soon after the other
    not_before: float = 0.0

    @property
    def running(self) -> ActorHandle:
        """The actor, where it is known that there is one, as in the slots of `ActorPlacement.active`."""
        assert self.actor is not None
        return self.actor


class ActorPlacement:
    """The slots of one job, and the nodes of the cluster as they were seen last.

    `bounds` are those of --nnodes; `need` is what each node must have.

    The *first group* has a bundle for each node with which the job began. A node that came later has a group for itself
    (`Slot.single_node`).
    """

    def __init__(self, cluster: RayCluster, bounds: Bounds, need: Need):
        self._cluster = cluster
        self._bounds = bounds
        self._need = need
        self.slots: list[Slot] = []

        # The live nodes, by id, and when they were looked at.
        self.nodes: dict[str, RayNode] = {}
        self._looked = float("-inf")

        # Since when Ray's control service has not answered.
        self.silent_since: float | None = None

    # ---- what is there ----

    def look(self) -> None:
        """Look at the cluster, at most once a second."""
        now = self._cluster.now()
        if now - self._looked < 1.0:
            return

        self._looked = now
        try:
            self._see(now)
            self.silent_since = None
        except RayUnavailable as error:
            self.note_silence(error)

    def look_again(self) -> None:
        """Have the next call of `look` ask Ray, however soon it comes: what was seen is out of date."""
        self._looked = float("-inf")

    def note_silence(self, error: RayUnavailable) -> None:
        """Go on with what is known of the cluster: actors and launchers do not need Ray's control service."""
        if self.silent_since is None:
            self.silent_since = self._cluster.now()
            print_line(f"lockstep: Ray's control service does not answer ({error}): going on as before")

    def _see(self, now: float) -> None:
        """Note what Ray says of the nodes and of this job's groups. Raises RayUnavailable."""
        # All questions come before the first change: if Ray answers only some of them, the last picture stays whole.
        nodes = {node.id: node for node in self._cluster.nodes()}
        placed = {id(slot.group): self._cluster.placed(slot.group) for slot in self.slots}

        self.nodes = nodes
        for slot in self.slots:
            slot.placed = placed[id(slot.group)][slot.bundle]

        # A group for one node goes with the node. Ray keeps it otherwise, and would wait for that node for ever.
        for slot in list(self.slots):
            if not slot.single_node or slot.actor is not None:
                continue

            # A bundle whose node has gone is nowhere; then the place of its last actor tells which node that was.
            where = slot.placed or (slot.node.id if slot.node else "")
            unplaced = not where and now - slot.since >= UNPLACED_S
            leaves = bool(where) and (where not in nodes or self.drained_node(where) is not None)
            if unplaced or leaves:
                self.release(slot)

    def check_size(self, may_grow: bool) -> None:
        """Raise a UserError if the cluster has too few nodes for this job, even when nothing else runs there.

        `may_grow`: nodes may still be added, by an autoscaler for example, which sees what is asked for.
        """
        self.look()
        if self.silent_since is not None:
            raise UserError(
                f"the Ray cluster at {self._cluster.address} does not say which nodes it has",
                "its control service, on the head node, does not answer",
                "run the same command again when it does; `ray status` says whether it does",
            )

        least = self._bounds.least
        nodes = list(self.nodes.values())
        large_enough = [node for node in nodes if node.drained_at is None and not node.lacks(self._need)]

        if len(large_enough) < least and not may_grow:
            raise too_small(self._cluster.address, least, self._need, nodes)

        if "GPU" not in self._need and any(node.total.get("GPU") for node in nodes):
            print_line(
                "lockstep: the cluster has GPUs, and this job asks for none: it trains on CPUs (see --gpus-per-node)"
            )

    def what_is_missing(self) -> str:
        """Return how many nodes are ready, and what each node of the cluster has, for a message."""
        ready = plural(len(self.usable()), "node is", "nodes are")
        states = "; ".join(state_of(node, self._need) for node in self.nodes.values())
        return (
            f"{ready} ready of {self._bounds.least} that are needed, with {describe(self._need)} each. "
            f"The cluster: {states or 'no nodes'}"
        )

    def drained_node(self, node_id: str) -> RayNode | None:
        """Return a node if Ray is about to take it away."""
        node = self.nodes.get(node_id)
        return node if node and node.drained_at is not None else None

    # ---- slots ----

    @property
    def active(self) -> list[Slot]:
        """The slots that have an actor."""
        return [slot for slot in self.slots if slot.actor is not None]

    def usable(self) -> list[Slot]:
        """Return the slots where an actor may start now: one on each node, and none on a node that has an actor."""
        # Ray may move a lost bundle of the first group to a node for which the job has a group of its own.
        taken = {slot.node.id for slot in self.active if slot.node}
        usable = []

        for slot in self.slots:
            node = self.nodes.get(slot.placed)
            if slot.actor is not None or node is None or node.drained_at is not None:
                continue

            if node.id not in taken:
                taken.add(node.id)
                usable.append(slot)

        return usable

    def _available(self) -> list[RayNode]:
        """Return the nodes that stay, and that are free or reserved for this job."""
        held = {slot.placed for slot in self.slots}
        staying = [node for node in self.nodes.values() if node.drained_at is None]
        return [node for node in staying if node.id in held or node.has_free(self._need)]

    def reserve(self) -> None:
        """Ask Ray for as many nodes as are free now, within --nnodes, instead of what the job has. No actor runs."""
        # At least the fewest, even if fewer are free: the group then waits in Ray's queue, and an autoscaler sees it.
        count = max(self._bounds.least, min(self._bounds.most, len(self._available())))

        # The old group goes first: Ray may need its nodes for the new one.
        try:
            self.release_all()
            group = self._cluster.reserve(count, self._need)
        except RayUnavailable as error:
            self.note_silence(error)
            return

        now = self._cluster.now()
        self.slots = [Slot(group, bundle, now) for bundle in range(count)]
        self.look_again()

    def release(self, slot: Slot) -> None:
        """Give the group of a slot back, and with it all its slots. Raises RayUnavailable."""
        if slot in self.slots:
            self._cluster.release(slot.group)
            self.slots = [other for other in self.slots if other.group is not slot.group]

    def release_all(self) -> None:
        """Give everything back. Raises RayUnavailable."""
        for slot in list(self.slots):
            self.release(slot)

    def ask_for_less(self) -> None:
        """Ask anew if Ray has not placed the first group for a while: another job may have been faster."""
        # A placement group is given whole or not at all: one node too many, and the job gets none.
        placed = any(slot.placed or slot.single_node for slot in self.slots)
        could_be_less = len(self.slots) > self._bounds.least
        if not placed and could_be_less and self._cluster.now() - self.slots[0].since >= UNPLACED_S:
            self.reserve()

    def leave_drained_bundles(self) -> None:
        """Ask anew if a bundle of the first group is on a node that is drained, and the job can go on without it.

        Ray would put that bundle on another node once the drained one is gone, for which the job may have no use. One
        bundle of a group cannot be given back.
        """
        drained = [slot for slot in self.slots if not slot.single_node and self.drained_node(slot.placed)]
        if not self.slots or (drained and len(self._available()) >= self._bounds.least):
            self.reserve()

    def grow(self) -> None:
        """Ask for a node that has room and no actor, if the job may have more nodes."""
        # Ray puts lost bundles of the group there first, and later also those on nodes that are drained.
        waiting = any(slot.placed not in self.nodes for slot in self.slots)
        if waiting or self.silent_since is not None or len(self.slots) >= self._bounds.most:
            return

        held = {slot.placed for slot in self.slots}
        new = next((node for node in self._available() if node.id not in held), None)
        if new is None:
            return

        # One node at a time: the next look shows whether Ray has given it. It is a group for itself, because a group
        # of Ray cannot get another bundle.
        try:
            group = self._cluster.reserve(1, self._need, new.id)
        except RayUnavailable as error:
            self.note_silence(error)
        else:
            self.slots.append(Slot(group, 0, self._cluster.now(), single_node=True))
            self.look_again()
