"""All that Lockstep asks of Ray: its nodes, placement groups, and actors.

Ray's control service may be restarting when it is asked. Whatever a call raises then, the driver sees a
`RayUnavailable`, and goes on with what it knows: actors and launchers do not need that service.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lockstep.clusters.ray.actor import ActorReport, NodeActor
from lockstep.errors import UserError, pip_install, plural

# What one node must have: the name of a resource, as Ray spells it, and how much of it.
Need = Mapping[str, float]


def _ray(module: str = "") -> Any:
    """Return Ray, or a module of it: it is imported only where it is needed, and need not be installed elsewhere."""
    return import_module(f"ray.{module}" if module else "ray")


class ActorLost(Exception):
    """The actor is gone, or could not do its work; the text says why."""


class RayUnavailable(Exception):
    """Ray's control service has not done what it was asked for; it may be restarting. The text says what it said."""


@contextmanager
def _asking() -> Iterator[None]:
    """Turn what a call to Ray's control service raises into RayUnavailable."""
    try:
        yield
    except Exception as error:  # Ray has no common class for what its calls raise: some come from gRPC
        raise RayUnavailable(str(error).strip().partition("\n")[0] or type(error).__name__) from error


@dataclass(frozen=True)
class RayNode:
    """A live node of the cluster. `drained_at` is when it will be taken away, as Unix time, 0.0 if soon; else None."""

    id: str
    host: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    drained_at: float | None = None

    def lacks(self, need: Need) -> bool:
        """Return whether the node has too little, even when nothing runs there."""
        return any(self.total.get(name, 0.0) < amount for name, amount in need.items())

    def has_free(self, need: Need) -> bool:
        return all(self.free.get(name, 0.0) >= amount for name, amount in need.items())


def describe(need: Need) -> str:
    """Return "2 CPU and 8 GPU"."""
    return " and ".join(f"{amount:g} {name}" for name, amount in need.items())


def too_small(address: str, least: int, need: Need, nodes: list[RayNode]) -> UserError:
    """Return the error for a job that the cluster could not run even if nothing else ran there."""
    large_enough = sum(node.drained_at is None and not node.lacks(need) for node in nodes)
    states = "; ".join(state_of(node, need) for node in nodes)
    return UserError(
        f"the Ray cluster at {address} is too small for this job: {plural(least, 'node')} with {describe(need)} each",
        f"{large_enough} of its {plural(len(nodes), 'node')} would do. {states}",
        "ask for less (--nnodes, --nproc, --cpus-per-node, --gpus-per-node), or add nodes; if they are on their way, "
        "from an autoscaler, say, --wait SECONDS waits for them",
    )


def state_of(node: RayNode, need: Need) -> str:
    """Return how much a node has of each resource that is needed, and what is missing."""
    if node.drained_at is not None:
        return f"{node.host}: being taken away"

    parts = []
    for name, amount in need.items():
        total, free = node.total.get(name, 0.0), node.free.get(name, 0.0)
        if total < amount:
            parts.append(f"{total:g} {name} ({amount - total:g} missing)")
        elif free < amount:
            parts.append(f"{total:g} {name} ({total - free:g} in use)")
        else:
            parts.append(f"{total:g} {name}")

    return f"{node.host}: {', '.join(parts)}"


class ActorHandle:
    """The driver's side of an actor. No call waits for the node: it returns None until the answer is there.

    It keeps at most one question under way. The driver asks all actors in turn, several times a second, and must not
    wait for one of them.
    """

    def __init__(self, actor: Any):
        self._actor = actor

        # The question that has no answer yet.
        self._asked: Any = None

    def address(self, host: str) -> str | None:
        """Return an address of the node where the others can join. Raises ActorLost."""
        return self._answer(self._asked or self._actor.address.remote(host))

    def start(self, words: Sequence[str]) -> None:
        """Start the launcher. If that fails, `poll` says so."""
        self._asked = self._actor.start.remote(list(words))

    def poll(self) -> ActorReport | None:
        """Return what has happened since the last report. Raises ActorLost."""
        return self._answer(self._asked or self._actor.poll.remote())

    def _answer(self, question: Any) -> Any:
        ray, errors = _ray(), _ray("exceptions")
        self._asked = question
        if not ray.wait([question], timeout=0)[0]:
            return None

        self._asked = None
        try:
            return ray.get(question)
        except errors.ActorUnavailableError:
            return None  # the connection broke, and the actor may live: Ray will say
        except errors.RayTaskError as error:
            # An error that the user can fix is reported like one of a launcher, with the exit code for it.
            if isinstance(error.cause, UserError):
                return ActorReport([f"lockstep: {error.cause}"], 2)

            raise ActorLost(str(error.cause or error)) from None
        except errors.RayActorError as error:
            raise ActorLost(str(error).strip().splitlines()[0]) from None

    def signal(self, name: str) -> None:
        self._actor.signal.remote(name)

    def kill(self) -> None:
        """End the actor at once. Its launcher, and the ranks of that, end with it."""
        # The actor ends with this process at the latest.
        with suppress(RayUnavailable), _asking():
            _ray().kill(self._actor)


def _connect(address: str) -> None:
    """Connect to the address of a cluster once. Raises OSError: Ray itself would try for many minutes."""
    where = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    host, _, port = where.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), 10.0).close()
        except OSError as error:
            raise OSError(f"{where}: {error.strerror or error}") from None


class RayCluster:
    """A connection to a Ray cluster. Everything that was made through it ends with this process."""

    def __init__(self, address: str):
        try:
            ray = _ray()
        except ModuleNotFoundError:
            raise UserError(
                "lockstep launch ray --submit needs Ray",
                "it is not installed here",
                pip_install("ray"),
            ) from None

        if address.startswith("ray://"):
            raise UserError(
                f"--address {address} is Ray's client, which does not place nodes one by one",
                "an address for notebooks",
                "run this on a machine of the cluster, with --address auto, or submit it with `ray job submit`",
            )

        try:
            _connect(address)
            # The output of the actors comes with their reports.
            self._context = ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(
                f"no Ray cluster answers at --address {address}",
                str(error).strip().splitlines()[0],
                "start one with `ray start --head`, or name another one: --address HOST:6379",
            ) from None

    @property
    def address(self) -> str:
        return self._context.address_info["gcs_address"]

    @property
    def uploaded_folder(self) -> bool:
        """Whether Ray has brought the working folder to every node, as `ray job submit --working-dir` does."""
        return bool(_ray().get_runtime_context().runtime_env.get("working_dir"))

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    # ---- nodes ----

    def nodes(self) -> list[RayNode]:
        """Return the nodes that are alive, with what is free there. Raises RayUnavailable."""
        with _asking():
            return self._nodes()

    def _nodes(self) -> list[RayNode]:
        # Neither free resources nor drained nodes have a public call. Ray Train asks for them in the same way.
        ray = _ray()
        state = ray._private.state.state
        free = state.available_resources_per_node()
        leaving = state.get_draining_nodes()

        return [
            RayNode(
                id=node["NodeID"],
                host=node["NodeManagerAddress"],
                total=node["Resources"],
                free=free.get(node["NodeID"], {}),
                drained_at=leaving[node["NodeID"]] / 1000 if node["NodeID"] in leaving else None,
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    # ---- placement groups ----

    def reserve(self, count: int, need: Need, node: str | None = None) -> Any:
        """Ask Ray for this on each of `count` nodes, or on this `node`. Raises RayUnavailable.

        Return a group that may not be placed yet.
        """
        selector = None if node is None else [{"ray.io/node-id": node}]
        make = _ray("util.placement_group").placement_group
        with _asking():
            return make([dict(need)] * count, strategy="STRICT_SPREAD", bundle_label_selector=selector)

    def placed(self, group: Any) -> list[str]:
        """Return the node of each bundle, "" for one that has none now. Raises RayUnavailable."""
        with _asking():
            table = _ray("util.placement_group").placement_group_table(group)

        nodes = table["bundles_to_node_id"] if table.get("state") != "REMOVED" else {}
        return [nodes.get(bundle) or "" for bundle in range(len(group.bundle_specs))]

    def release(self, group: Any) -> None:
        """Give a group back. Raises RayUnavailable."""
        with _asking():
            _ray("util.placement_group").remove_placement_group(group)

    # ---- actors ----

    def make_actor(self, group: Any, bundle: int, need: Need, arguments: Sequence[Any]) -> ActorHandle:
        """Make an actor in a bundle, with the arguments of `NodeActor`. Raises RayUnavailable."""
        strategy = _ray("util.scheduling_strategies").PlacementGroupSchedulingStrategy
        others = {name: amount for name, amount in need.items() if name not in ("CPU", "GPU")}
        options = {
            "num_cpus": need.get("CPU", 0),
            "num_gpus": need.get("GPU", 0),
            "resources": others,
            "max_restarts": 0,  # the driver makes a new one, where the bundle is by then
            "scheduling_strategy": strategy(group, placement_group_bundle_index=bundle),
        }
        with _asking():
            return ActorHandle(_ray().remote(NodeActor).options(**options).remote(*arguments))

    def close(self) -> None:
        _ray().shutdown()
