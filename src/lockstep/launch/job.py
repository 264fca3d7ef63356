"""What is to be run, and on how many processes and machines."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.runtime.machine import available_cores, visible_gpus

# What every rank needs sooner or later. Imported once, in the process that all ranks are forked from.
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
FROM_LAUNCHER = "launcher"  # the source of settings that one node decides for all: the run folder's name


@dataclass(frozen=True)
class Count:
    """Between `least` and `most`; begin with `start`, or else with `most`."""

    least: int
    most: int
    start: int | None = None

    @property
    def first(self) -> int:
        return self.most if self.start is None else self.start

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}..{self.most}"


@dataclass(frozen=True)
class Job:
    """`spec` is what a rank is told: plain JSON. Its key "again" is the command that continues the job."""

    spec: dict[str, Any]
    run_dir: Path
    nproc: Count
    nnodes: Count = Count(1, 1)
    join: str | None = None  # HOST:PORT where the nodes meet
    host: str | None = None  # this node's name and address, where its own choice would be wrong
    worker: str = "lockstep.worker"  # the module whose `main(spec)` a rank runs
    preload: tuple[str, ...] = PRELOAD

    @property
    def again(self) -> str:
        return self.spec.get("again") or "run the same command again with --resume auto"

    @property
    def identity(self) -> dict[str, Any]:
        """What must be equal on all nodes. Where Python finds its modules may differ, and one node names the run."""
        kept = {key: value for key, value in self.spec.items() if key not in ("path", "again", "layers")}
        layers = [layer for layer in self.spec.get("layers", []) if layer[0] != FROM_LAUNCHER]
        return json.loads(json.dumps({**kept, "layers": layers, "nnodes": str(self.nnodes)}, default=str))

    @property
    def decided(self) -> list[Any]:
        """The settings that the coordinating node has decided for all."""
        chosen = [layer for layer in self.spec.get("layers", []) if layer[0] == FROM_LAUNCHER]
        return json.loads(json.dumps(chosen, default=str))


def divide(ranks: int, counts: Mapping[int, Count]) -> dict[int, int]:
    """So many ranks over the nodes, as evenly as their bounds allow."""
    given = {number: count.least for number, count in counts.items()}
    for _ in range(ranks - sum(given.values())):
        room = [number for number, count in counts.items() if given[number] < count.most]
        given[min(room, key=lambda number: given[number])] += 1
    return given


def parse_nproc(asked: str | int | None) -> Count:
    """`auto`: one process per GPU; without a GPU two, so that what you try is distributed, or one on a single core."""
    if asked is None:
        return Count(1, 1)
    if asked == "auto":
        count = visible_gpus() or min(2, available_cores())
        return Count(count, count)
    least, most = _range(str(asked), "..")
    if not 1 <= least <= most:
        raise UserError(
            f"--nproc {asked}",
            "neither a count, nor a range, nor auto",
            "type --nproc 2, --nproc 1..8, or --nproc auto",
        )
    if least == most:
        return Count(least, most)
    return Count(least, most, start=max(least, min(most, visible_gpus() or available_cores())))


def parse_nnodes(asked: str | int | None) -> Count:
    if asked is None:
        return Count(1, 1)
    least, most = _range(str(asked), ":")
    if not 1 <= least <= most:
        raise UserError(f"--nnodes {asked}", "neither a count nor a range", "type --nnodes 2, or --nnodes 1:4")
    return Count(least, most)


def parse_join(asked: str) -> tuple[str, int]:
    host, colon, port = asked.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise UserError(f"--join {asked}", "no HOST:PORT", "type --join and one node's address, as in 10.0.0.1:29400")
    return host.strip("[]"), int(port)


def _range(text: str, between: str) -> tuple[int, int]:
    """(0, 0) for what is neither a number nor two."""
    match = re.fullmatch(rf"(\d+)(?:{re.escape(between)}(\d+))?", text, re.ASCII)
    return (int(match[1]), int(match[2] or match[1])) if match else (0, 0)


def append_event(run_dir: Path, event: dict[str, Any]) -> None:
    """One line, one write: ranks append to the same file."""
    line = json.dumps({"time": time.time(), **event}, allow_nan=False) + "\n"
    run_dir.mkdir(parents=True, exist_ok=True)
    file = os.open(run_dir / "events.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)
