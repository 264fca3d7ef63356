"""Ranks, nodes and devices of a job: from the environment, a file or code, checked, and back again."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lockstep.classic.amp_config import AMPConfig
from lockstep.classic.process_group import BACKENDS, check_announced, started_world
from lockstep.config import read_file
from lockstep.errors import ConfigError, UserError, unknown_name
from lockstep.runtime.world import World

LAUNCHERS = {
    "torchrun": ["torchrun"],
    "torch.distributed.launch": [sys.executable, "-m", "torch.distributed.launch"],
}

# Fields that torchrun sets, and its variables. All other fields are DIST_NAME in the environment, as JSON.
STANDARD = {
    "world_size": "WORLD_SIZE",
    "rank": "RANK",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "num_nodes": "GROUP_WORLD_SIZE",
    "node_rank": "GROUP_RANK",
    "num_gpus_per_node": "LOCAL_WORLD_SIZE",
}


@dataclass
class DistributedConfig:
    """The rank of one process in a job, and options of DDP."""

    world_size: int = 1
    rank: int = 0

    # nccl where no two ranks share a GPU; gloo elsewhere.
    backend: str = "nccl"
    master_addr: str = "localhost"
    master_port: int = 29500
    num_nodes: int = 1
    node_rank: int = 0
    num_gpus_per_node: int = 1

    # GPUs of this node, one for each of its processes.
    device_ids: list[int] | None = None
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    gradient_as_bucket_view: bool = True
    launch_method: str = "torchrun"

    # The rank of this node's first process, where nodes have different numbers of them; None: all have the same.
    first_rank: int | None = None

    @property
    def local_rank(self) -> int:
        """The number of this process on its node. Nodes hold consecutive ranks."""
        return self.rank - self._first_rank

    @property
    def _first_rank(self) -> int:
        return self.node_rank * self.num_gpus_per_node if self.first_rank is None else self.first_rank

    @property
    def knows_nodes(self) -> bool:
        """Whether nodes and processes per node add up to the ranks, so that `local_rank` means something."""
        return self.first_rank is not None or self.world_size == self.num_nodes * self.num_gpus_per_node

    def ddp_settings(self) -> dict[str, Any]:
        """Return the options of DDP as settings of a run."""
        names = ("find_unused_parameters", "broadcast_buffers", "gradient_as_bucket_view")
        return {f"ddp.{name}": getattr(self, name) for name in names}

    def to_env_dict(self) -> dict[str, str]:
        """Return the environment of this rank's process, which `from_env` reads back."""
        values = asdict(self)

        # Names that every launcher sets come first; the others are ours, as JSON.
        env = {name: str(values.pop(key)) for key, name in STANDARD.items()}
        env |= {f"DIST_{key.upper()}": json.dumps(value) for key, value in values.items()}
        env |= {"LOCAL_RANK": str(self.local_rank), "NODE_RANK": str(self.node_rank)}

        if self.device_ids is not None:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.device_ids))

        return env

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> DistributedConfig:
        """Return the configuration of a process that a launcher started, or of a single process if none did."""
        check_announced(env)
        values: dict[str, Any] = {}

        for field in fields(cls):
            name = STANDARD.get(field.name, f"DIST_{field.name.upper()}")
            if name in env:
                values[field.name] = _parsed(field.name, name, env[name])

        local_rank = _parsed("rank", "LOCAL_RANK", env["LOCAL_RANK"]) if "LOCAL_RANK" in env else None
        return cls(**values)._with_nodes_of(values, local_rank)

    def _with_nodes_of(self, known: Mapping[str, Any], local_rank: int | None) -> DistributedConfig:
        """Fill in what a launcher other than torchrun leaves out, and see whether nodes are equal."""
        if "num_gpus_per_node" not in known and self.world_size > 1:
            # Ranks that were started by hand, on one node.
            if local_rank not in (None, self.rank):
                raise UserError(
                    "LOCAL_WORLD_SIZE is not set for a rank of several nodes",
                    f"RANK={self.rank} and LOCAL_RANK={local_rank}",
                    "set LOCAL_WORLD_SIZE to the number of processes on this node, or use torchrun",
                )

            self.num_gpus_per_node = self.world_size // max(1, self.num_nodes)

        if "num_nodes" not in known and self.num_gpus_per_node > 0:
            # Rounded up: a node may have fewer processes than this one.
            equal = -(-self.world_size // self.num_gpus_per_node)
            self.num_nodes = max(1, equal, self.node_rank + 1)

        # Where this node begins follows from LOCAL_RANK, on nodes of any size.
        first = self.rank - (self.local_rank if local_rank is None else local_rank)
        if "node_rank" not in known and self.knows_nodes and first % self.num_gpus_per_node == 0:
            self.node_rank = first // self.num_gpus_per_node

        if "first_rank" not in known and (first != self._first_rank or not self.knows_nodes):
            self.first_rank = first

        return self

    @classmethod
    def from_file(cls, path: str | Path) -> DistributedConfig:
        """Read a .yaml, .yml or .json file with some of the fields."""
        values = read_file(path)
        known = [f.name for f in fields(cls)]

        # A misspelt field must not be ignored.
        for key in values:
            if key not in known:
                raise UserError(f"{path} has an unknown setting {key}", "", f"choose from {', '.join(known)}")

        return cls(**values)

    # The documentation names a method for each format; the file's suffix decides.
    from_yaml = from_json = from_file

    def save(self, path: str | Path) -> None:
        """Write the fields as JSON, which is also YAML."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    def command(self, script: str, arguments: Sequence[str] = ()) -> list[str]:
        """Return the command to type on this node."""
        return [
            *LAUNCHERS[self.launch_method],
            f"--nproc_per_node={self.num_gpus_per_node}",
            f"--nnodes={self.num_nodes}",
            f"--node_rank={self.node_rank}",
            f"--master_addr={self.master_addr}",
            f"--master_port={self.master_port}",
            script,
            *arguments,
        ]

    def validate(self) -> bool:
        """Return True, or raise every problem at once: what passes here, a trainer accepts in this process."""
        # Values of a wrong type could not be compared.
        problems = list(self._wrong_types())
        if not problems:
            problems = [*self._wrong_ranks(), *self._wrong_values(), *self._wrong_options()]

            # Only a process that a launcher has started knows its world.
            world = started_world()
            if world is not None and (problem := self.contradiction(world)):
                problems.append(problem)

        if problems:
            raise ConfigError(problems)

        return True

    def check_values(self) -> None:
        """Raise every problem with single values, for a configuration that does not know its nodes."""
        if problems := list(self._wrong_types()) or list(self._wrong_values()):
            raise ConfigError(problems)

    def contradiction(self, world: World) -> UserError | None:
        """Return the error of a configuration for another rank than `world`, which this process is."""
        # The defaults contradict nothing.
        if (self.rank, self.world_size) in ((0, 1), (world.rank, world.size)):
            return None

        return UserError(
            f"rank={self.rank}, world_size={self.world_size} were given to a process that was started as rank "
            f"{world.rank} of {world.size}",
            "",
            "leave rank and world_size out: they are read from the environment",
        )

    def _wrong_types(self) -> Iterator[UserError]:
        """Yield the fields whose values have another type than their defaults."""
        # The types of the defaults: annotations are only strings in this module.
        defaults = DistributedConfig()

        for field in fields(self):
            value = getattr(self, field.name)
            kind = type(getattr(defaults, field.name))

            if field.name == "device_ids":
                right = value is None or (isinstance(value, list | tuple) and all(type(one) is int for one in value))
                what = "a list of whole numbers"
            elif field.name == "first_rank":
                right = value is None or type(value) is int
                what = "a whole number"
            else:
                right = type(value) is kind
                what = f"of type {kind.__name__}"

            if not right:
                yield UserError(
                    f"{field.name}={value!r} is not {what}", "", f"give {field.name} a value that is {what}"
                )

    def _wrong_ranks(self) -> Iterator[UserError]:
        """Yield what is wrong with the numbers of ranks and nodes: they must describe one job."""
        processes = self.num_nodes * self.num_gpus_per_node
        last = self._first_rank + self.num_gpus_per_node - 1
        if self.first_rank is not None:
            # Nodes of different sizes: only this one's is known.
            if not 0 <= self.first_rank <= last < self.world_size or self.num_nodes > self.world_size:
                yield UserError(
                    f"first_rank={self.first_rank} and num_gpus_per_node={self.num_gpus_per_node} are not a node of "
                    f"world_size={self.world_size} on num_nodes={self.num_nodes}",
                    "",
                    "let torchrun set them, or leave first_rank out if all nodes have the same number of processes",
                )
        elif processes != self.world_size or processes < 1:
            yield UserError(
                f"world_size={self.world_size} is not num_nodes x num_gpus_per_node",
                f"num_nodes={self.num_nodes} x num_gpus_per_node={self.num_gpus_per_node} = {processes}",
                f"set world_size to {processes}, or the other two so that they give {self.world_size}",
            )

        if not 0 <= self.node_rank < self.num_nodes:
            yield UserError(
                f"node_rank={self.node_rank} is not a node of num_nodes={self.num_nodes}",
                "",
                f"count nodes from 0 to {self.num_nodes - 1}",
            )

        # Nodes hold consecutive ranks.
        if not self._first_rank <= self.rank <= last:
            yield UserError(
                f"rank={self.rank} is not on the node node_rank={self.node_rank}",
                f"this node holds the ranks {self._first_rank} to {last}",
                "set rank to node_rank x num_gpus_per_node + the number of the process on its node",
            )

    def _wrong_values(self) -> Iterator[UserError]:
        """Yield values that no job can have."""
        if not 1 <= self.master_port <= 65535:
            yield UserError(f"master_port={self.master_port} is not a port", "", "choose 1024 to 65535")

        if not self.master_addr.strip():
            yield UserError("master_addr is empty", "", "give the address of node 0, or leave master_addr out")

        # Agents of torchrun that have met there are on one machine.
        met = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("MASTER_ADDR") == self.master_addr
        if self.num_nodes > 1 and self.master_addr in ("localhost", "127.0.0.1", "::1") and not met:
            yield UserError(
                f"master_addr={self.master_addr} cannot be used with num_nodes={self.num_nodes}",
                "on every node it is the address of that node itself",
                "give the address of node 0",
            )

        for name, known in (("backend", BACKENDS), ("launch_method", LAUNCHERS)):
            if getattr(self, name) not in known:
                yield unknown_name(name, getattr(self, name), known)

        # More GPUs than processes are fine.
        ids = self.device_ids
        if ids is not None and (len({*ids}) < max(1, len(ids), self.num_gpus_per_node) or min(ids, default=0) < 0):
            yield UserError(
                f"device_ids={ids} are not {self.num_gpus_per_node} different GPUs for the processes of this node",
                "",
                "name a different GPU for each process, counted from 0",
            )

    def _wrong_options(self) -> Iterator[UserError]:
        """Ask the engine about the options of DDP, and answer with the names of the fields."""
        try:
            AMPConfig().run_config(**self.ddp_settings())
        except ConfigError as error:
            for problem in error.problems:
                yield UserError(*(text.replace("ddp.", "") for text in problem.args))


def _parsed(field: str, name: str, text: str) -> Any:
    """Return the value of the variable `name`: an address, a whole number, or JSON."""
    if field == "master_addr":
        return text

    try:
        return int(text) if field in STANDARD else json.loads(text)
    except ValueError:
        kind = "a whole number" if field in STANDARD else "JSON"
        raise UserError(
            f"the environment variable {name}={text!r} is not {kind}", "", f"set {name} to {kind}, or unset it"
        ) from None
