"""The job that a launcher runs: what each rank executes, on how many processes and nodes, and when it restarts."""

from __future__ import annotations

import ipaddress
import json
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.config.sections import HangConfig, RestartConfig
from lockstep.config.value_types import ConfigSection
from lockstep.errors import ExitCode, UserError
from lockstep.runtime.host.resources import available_cores, visible_gpus

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

# The coordinating node's number. The others get theirs, from 1 on, in the order in which they join.
COORDINATOR = 0

# The key of a job's `spec` under which each node says which versions and which sources it has.
PROGRAM = "program"


@dataclass(frozen=True)
class Bounds:
    """The fewest and the most ranks or nodes. The job starts with `start_with` of them, or else with `most`."""

    least: int
    most: int
    start_with: int | None = None

    @property
    def initial(self) -> int:
        return self.most if self.start_with is None else self.start_with

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}..{self.most}"


@dataclass(frozen=True)
class Job:
    """A job, as the command on one node describes it."""

    spec: dict[str, Any]  # passed to every rank, as plain JSON
    run_dir: Path
    nproc: Bounds
    nnodes: Bounds = Bounds(1, 1)
    join: str | None = None  # HOST:PORT where the nodes meet, or several with commas between them
    host: str | None = None  # this node's name and address, where the default would be wrong

    # This node's number, if a platform numbers its nodes: then number 0 coordinates first, at the address of `join`.
    node: int | None = None

    # Whether the user has named no run folder. On several nodes the coordinator's choice then applies to all nodes.
    run_dir_was_chosen: bool = False

    # The name of a checkpoint of this run, if --resume names one: the first attempt goes back to it.
    goes_back_to: str | None = None

    # The command that resumes the job.
    resume_command: str = "run the same command again with --resume auto"

    # The function that a rank calls with `spec`, as MODULE:FUNCTION. It is text, because this package must not import
    # the layers above it.
    entry: str = "lockstep.api:work"
    preload: tuple[str, ...] = PRELOAD

    @property
    def spec_for_ranks(self) -> dict[str, Any]:
        """`spec`, and the run folder where no setting names it."""
        return {**self.spec, "run_dir": str(self.run_dir)} if self.run_dir_was_chosen else self.spec

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
        if not self.run_dir_was_chosen:
            return self.run_dir / ".secret"

        return self.run_dir.parent / f".secret-{re.sub('[^0-9A-Za-z.]', '-', self.join or '')}"

    @property
    def identity(self) -> dict[str, Any]:
        """The part of the command that must be equal on all nodes."""
        # Nodes may have Python's modules in different folders.
        shared = {key: value for key, value in self.spec.items() if key != "path"}
        return as_json({**shared, "nnodes": str(self.nnodes)})


def as_json(values: Any) -> Any:
    """Return the values as they look after a trip through JSON: a Path in a setting, say, becomes text."""
    return json.loads(json.dumps(values, default=str))


# ---- the settings of its task ----


class LauncherSettings(ConfigSection):
    """The settings of the task that the launcher needs: when ranks count as hanging, and how often a job restarts.

    Until rank 0 has read them, the defaults apply.
    """

    hang: HangConfig = HangConfig()
    restart: RestartConfig = RestartConfig()

    @property
    def code_if_nodes_are_missing(self) -> ExitCode:
        """The platform may have other machines, unless the user wants no restart at all."""
        return ExitCode.RESTART if self.restart.per_hour else ExitCode.FAILED


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
    here = visible_gpus() or available_cores()
    return replace(bounds, start_with=max(bounds.least, min(bounds.most, here)))


def parse_nnodes(asked: str | int | None) -> Bounds:
    """Parse `--nnodes`: a count, or a range like 1:4."""
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
            f"the port {port}; ports are 1 to 65535" if host and numeric else "the form is HOST:PORT",
            "use --join and one node's address, as in 10.0.0.1:29400, or several with commas between them",
        )

    host = host.strip("[]")

    # Every machine could bind such an address, and would coordinate a job of its own.
    with suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            raise UserError(
                f"--join {asked} names no machine",
                f"{host} means every address of the machine that uses it",
                "use the address of one node, as the others reach it",
            )

    return host, int(port)
