"""The job that a launcher runs: what each rank executes, and on how many processes and machines."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.errors import UserError, plural
from lockstep.runtime.machine import available_cores, visible_gpus

# Modules that every rank needs. They are imported once, in the process that all ranks are forked from.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch._dynamo",
    "torch.utils.data",
    "safetensors.torch",
    "lockstep.api",
    "lockstep.engine.loop",
    "lockstep.engine.own_loop",
)

# Environment variable: what to type to resume the job, if it is not the command of this process.
RESUME_COMMAND = "LOCKSTEP_RESUME_COMMAND"

# How long the set of nodes must stay the same before an attempt starts with fewer nodes than may join.
SETTLE_S = 3.0

# The source of a setting that one node chooses for all nodes: the run folder.
FROM_LAUNCHER = "launcher"


@dataclass(frozen=True)
class Bounds:
    """The fewest and the most ranks or nodes. The job starts with `preferred` of them, or else with `most`."""

    least: int
    most: int
    preferred: int | None = None

    @property
    def initial(self) -> int:
        return self.most if self.preferred is None else self.preferred

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}..{self.most}"


@dataclass(frozen=True)
class Job:
    """A job, as the command on one node describes it."""

    spec: dict[str, Any]  # passed to every rank, as plain JSON; "resume_command" is what to type to resume the job
    run_dir: Path
    nproc: Bounds
    nnodes: Bounds = Bounds(1, 1)
    join: str | None = None  # HOST:PORT where the nodes meet, or several with commas between them
    host: str | None = None  # this node's name and address, where the default would be wrong

    # The function that a rank calls with `spec`, as MODULE:FUNCTION. It is text, because this package must not import
    # the layers above it.
    entry: str = "lockstep.api:work"
    preload: tuple[str, ...] = PRELOAD

    @property
    def resume_command(self) -> str:
        return self.spec.get("resume_command") or "run the same command again with --resume auto"

    @property
    def addresses(self) -> list[str]:
        """The addresses of --join, in order. Raises a UserError for an invalid address."""
        addresses = [address.strip() for address in (self.join or "").split(",")]
        for address in addresses:
            parse_address(address)

        return addresses

    @property
    def secret_path(self) -> Path:
        """The file with the job's secret, at a path that every node can compute before it has joined."""
        # Without run_dir on the command line, a node learns the run folder only when it has joined.
        if not self.decided:
            return self.run_dir / ".secret"

        return self.run_dir.parent / f".secret-{re.sub('[^0-9A-Za-z.]', '-', self.join or '')}"

    @property
    def identity(self) -> dict[str, Any]:
        """The part of the command that must be equal on all nodes."""
        # Nodes may have Python's modules in different folders, and the coordinator chooses the run folder.
        shared = {key: value for key, value in self.spec.items() if key not in ("path", "resume_command")}
        layers = [layer for layer in self.spec.get("layers", []) if layer[0] != FROM_LAUNCHER]
        return _plain({**shared, "layers": layers, "nnodes": str(self.nnodes)})

    @property
    def decided(self) -> list[Any]:
        """The layers of settings that this launcher has chosen: the run folder, unless the user has named one.

        On several machines the coordinator's choice applies to all nodes.
        """
        return _plain([layer for layer in self.spec.get("layers", []) if layer[0] == FROM_LAUNCHER])


def _plain(values: Any) -> Any:
    """Return the values as they look after a trip through JSON."""
    return json.loads(json.dumps(values, default=str))


# ---- nodes ----


@dataclass(frozen=True)
class Node:
    """One machine of the job. The coordinating node has number 0; `nproc` bounds the ranks that it can run."""

    number: int
    host: str
    nproc: Bounds


class Cluster:
    """The nodes of the job now, and how many ranks each should run in the next attempt."""

    def __init__(self, bounds: Bounds, now: float):
        self.bounds = bounds  # --nnodes
        self.nodes: dict[int, Node] = {}

        # Node -> ranks of the next attempt.
        self.wanted: dict[int, int] = {}

        # When a node last joined or left.
        self._changed = now

    def add(self, node: Node, now: float) -> None:
        self.nodes[node.number] = node
        self.wanted[node.number] = node.nproc.initial
        self._changed = now

    def remove(self, number: int, now: float) -> None:
        del self.nodes[number]
        del self.wanted[number]
        self._changed = now

    @property
    def world_size(self) -> int:
        return sum(self.wanted.values())

    @property
    def full(self) -> bool:
        return len(self.nodes) >= self.bounds.most

    @property
    def too_few(self) -> str | None:
        """Why the nodes are too few; None if they are enough."""
        needed = self.bounds.least
        return f"{plural(len(self.nodes), 'node')} left, and {needed} needed" if len(self.nodes) < needed else None

    def ready(self, now: float) -> bool:
        """Return whether an attempt can start: the cluster is full, or large enough and unchanged for a while."""
        return self.full or (not self.too_few and now - self._changed >= SETTLE_S)

    @property
    def rank_bounds(self) -> Bounds:
        nodes = self.nodes.values()
        return Bounds(sum(node.nproc.least for node in nodes), sum(node.nproc.most for node in nodes))

    def resize(self, ranks: int) -> None:
        self.wanted = divide(ranks, {number: node.nproc for number, node in sorted(self.nodes.items())})

    def shrink(self, number: int) -> None:
        if number in self.nodes and self.wanted[number] > self.nodes[number].nproc.least:
            self.wanted[number] -= 1


def divide(ranks: int, bounds: dict[int, Bounds]) -> dict[int, int]:
    """Divide this many ranks over the nodes, as evenly as their bounds allow."""
    shares = {number: allowed.least for number, allowed in bounds.items()}
    for _ in range(ranks - sum(shares.values())):
        room = [number for number, allowed in bounds.items() if shares[number] < allowed.most]
        shares[min(room, key=lambda number: shares[number])] += 1

    return shares


# ---- the command line ----


def parse_nproc(asked: str | int | None) -> Bounds:
    """Parse `--nproc`: a count, a range like 1..8, or auto.

    `auto` is one process per GPU. Without a GPU it is two, so that the run is distributed, or one on a single core.
    """
    if asked == "auto":
        asked = visible_gpus() or min(2, available_cores())

    bounds = _parse_range(
        asked,
        UserError(
            f"--nproc {asked} is not a number of processes",
            "neither a count, nor a range, nor auto",
            "use --nproc 2, --nproc 1..8, or --nproc auto",
        ),
    )
    if bounds.least == bounds.most:
        return bounds

    # A range begins with one process per GPU or core of this machine, within its bounds.
    return replace(bounds, preferred=max(bounds.least, min(bounds.most, visible_gpus() or available_cores())))


def parse_nnodes(asked: str | int | None) -> Bounds:
    return _parse_range(
        asked,
        UserError(
            f"--nnodes {asked} is not a number of nodes",
            "neither a count nor a range",
            "use --nnodes 2, or --nnodes 1:4",
        ),
    )


def _parse_range(asked: str | int | None, refusal: UserError) -> Bounds:
    """Parse one number, or two as in `1..8` or torchrun's `1:8`; None means 1. Otherwise raises `refusal`."""
    text = "1" if asked is None else str(asked)
    match = re.fullmatch(r"(\d+)(?:(?:\.\.|:)(\d+))?", text, re.ASCII)
    bounds = Bounds(int(match[1]), int(match[2] or match[1])) if match else Bounds(0, 0)
    if not 1 <= bounds.least <= bounds.most:
        raise refusal

    return bounds


def parse_address(asked: str) -> tuple[str, int]:
    host, colon, port = asked.rpartition(":")
    numeric = port.isascii() and port.isdigit()
    if not (colon and host and numeric and 0 < int(port) < 65536):
        raise UserError(
            f"--join {asked} is not an address",
            "the form is HOST:PORT",
            "use --join and one node's address, as in 10.0.0.1:29400, or several with commas between them",
        )

    host = host.strip("[]")

    # Every machine could bind such an address, and would coordinate a job of its own.
    with suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            raise UserError(
                f"--join {asked} names no machine",
                f"{host} stands for all addresses of whichever machine uses it",
                "use the address of one node, as the others reach it",
            )

    return host, int(port)


def append_event(run_dir: Path, event: dict[str, Any]) -> None:
    # A full disk must not end the launcher in the middle of a restart: better to lose the event.
    with suppress(OSError):
        run_dir.mkdir(parents=True, exist_ok=True)

        # A line is written in one call, because ranks append to the same file. They create it with the same mode.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with os.fdopen(os.open(run_dir / "events.jsonl", flags, 0o644), "ab", buffering=0) as file:
            file.write(json.dumps({"time": time.time(), **event}, allow_nan=False).encode() + b"\n")
