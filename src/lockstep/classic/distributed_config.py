"""Ranks, nodes and devices of a job: from the environment, a file or code, checked, and back again."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lockstep.classic.process_group import require_world_size
from lockstep.config import read_file
from lockstep.errors import ConfigError, UserError, unknown_name

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

    @property
    def local_rank(self) -> int:
        """The number of this process on its node. Nodes hold consecutive ranks."""
        return self.rank - self.node_rank * self.num_gpus_per_node

    def to_env_dict(self) -> dict[str, str]:
        """Return the environment of this rank's process, which `from_env` reads back."""
        values = asdict(self)
        env = {name: str(values.pop(key)) for key, name in STANDARD.items()}
        env |= {f"DIST_{key.upper()}": json.dumps(value) for key, value in values.items()}
        env |= {"LOCAL_RANK": str(self.local_rank), "NODE_RANK": str(self.node_rank)}
        if self.device_ids is not None:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.device_ids))
        return env

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> DistributedConfig:
        """Return the configuration of a process that a launcher started, or of a single process if none did."""
        require_world_size(env)
        values: dict[str, Any] = {}
        for field in fields(cls):
            name = STANDARD.get(field.name, f"DIST_{field.name.upper()}")
            if name in env:
                values[field.name] = _parsed(field.name, name, env[name])

        # torchrun does not say how many nodes there are.
        if "num_gpus_per_node" in values and "num_nodes" not in values:
            values["num_nodes"] = max(1, values.get("world_size", 1) // max(1, values["num_gpus_per_node"]))
        return cls(**values)

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
        """Return True, or raise every problem at once."""
        # Values of a wrong type could not be compared.
        problems = list(self._wrong_types()) or [*self._wrong_ranks(), *self._wrong_values()]
        if problems:
            raise ConfigError(problems)
        return True

    def _wrong_types(self) -> Iterator[UserError]:
        # The types of the defaults: annotations are only strings in this module.
        defaults = DistributedConfig()
        for field in fields(self):
            value = getattr(self, field.name)
            kind = type(getattr(defaults, field.name))
            if field.name != "device_ids" and type(value) is not kind:
                yield UserError(
                    f"{field.name}={value!r} is not of type {kind.__name__}",
                    "",
                    f"give it a value of type {kind.__name__}",
                )

    def _wrong_ranks(self) -> Iterator[UserError]:
        processes = self.num_nodes * self.num_gpus_per_node
        if processes != self.world_size or processes < 1:
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
        first = self.node_rank * self.num_gpus_per_node
        if not first <= self.rank < first + self.num_gpus_per_node:
            yield UserError(
                f"rank={self.rank} is not on node {self.node_rank}",
                f"this node holds the ranks {first} to {first + self.num_gpus_per_node - 1}",
                "set rank to node_rank x num_gpus_per_node + the number of the process on its node",
            )

    def _wrong_values(self) -> Iterator[UserError]:
        if not 1 <= self.master_port <= 65535:
            yield UserError(f"master_port={self.master_port} is not a port", "", "choose 1024 to 65535")

        if self.num_nodes > 1 and self.master_addr in ("localhost", "127.0.0.1", "::1"):
            yield UserError(
                f"master_addr={self.master_addr} cannot be used with num_nodes={self.num_nodes}",
                "on every node it is the address of that node itself",
                "give the address of node 0",
            )

        for name, known in (("backend", ("nccl", "gloo", "auto")), ("launch_method", LAUNCHERS)):
            if getattr(self, name) not in known:
                yield unknown_name(name, getattr(self, name), known)

        # More GPUs than processes are fine.
        ids = self.device_ids
        if ids is not None and (len(set(ids)) < len(ids) or len(ids) < self.num_gpus_per_node or min(ids) < 0):
            yield UserError(
                f"device_ids={ids} are not {self.num_gpus_per_node} different GPUs for the processes of this node",
                "",
                "name a different GPU for each process, counted from 0",
            )


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
