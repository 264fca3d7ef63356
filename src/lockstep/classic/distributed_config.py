"""Ranks, nodes and devices of a job: from the environment, a file or code, checked, and back again."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lockstep.config import read_file
from lockstep.errors import ConfigError, UserError

BACKENDS = ("nccl", "gloo", "auto")
LAUNCHERS = {
    "torchrun": ["torchrun"],
    "torch.distributed.launch": [sys.executable, "-m", "torch.distributed.launch"],
}
STANDARD = {  # what torchrun sets
    "world_size": "WORLD_SIZE",
    "rank": "RANK",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "node_rank": "GROUP_RANK",
    "num_gpus_per_node": "LOCAL_WORLD_SIZE",
}


@dataclass
class DistributedConfig:
    world_size: int = 1
    rank: int = 0
    backend: str = "nccl"  # where every rank has a GPU of its own; gloo elsewhere
    master_addr: str = "localhost"
    master_port: int = 29500
    num_nodes: int = 1
    node_rank: int = 0
    num_gpus_per_node: int = 1
    device_ids: list[int] | None = None  # of this node, one for each of its processes
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    gradient_as_bucket_view: bool = True
    launch_method: str = "torchrun"

    @property
    def local_rank(self) -> int:
        """Nodes hold ranks in a row: rank = node_rank x num_gpus_per_node + local rank."""
        return self.rank - self.node_rank * self.num_gpus_per_node

    def to_env_dict(self) -> dict[str, str]:
        """What this rank's process finds in its environment; `from_env` reads it back."""
        values = asdict(self)
        env = {name: str(values.pop(key)) for key, name in STANDARD.items()}
        env |= {f"DIST_{key.upper()}": json.dumps(value) for key, value in values.items()}
        env |= {"LOCAL_RANK": str(self.local_rank), "NODE_RANK": str(self.node_rank)}
        if self.device_ids is not None:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.device_ids))
        return env

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> DistributedConfig:
        """Of a process that torchrun, or anybody else, has started; one process if nobody has."""
        if "WORLD_SIZE" not in env and {"RANK", "LOCAL_RANK"} & env.keys():
            raise world_size_not_set(env)
        texts = {key: env[name] for key, name in STANDARD.items() if name in env}
        own = {f.name: f"DIST_{f.name.upper()}" for f in fields(cls) if f.name not in STANDARD}
        values: dict[str, Any] = {key: _json(name, env[name]) for key, name in own.items() if name in env}
        values |= {key: text if key == "master_addr" else _count(STANDARD[key], text) for key, text in texts.items()}
        if "num_gpus_per_node" in values and "num_nodes" not in values:
            values["num_nodes"] = max(1, values.get("world_size", 1) // max(1, values["num_gpus_per_node"]))
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path) -> DistributedConfig:
        """A .yaml, .yml or .json file with some of the fields."""
        values = read_file(path)
        known = [f.name for f in fields(cls)]
        if unknown := [key for key in values if key not in known]:
            raise UserError(f"{unknown[0]} in {path}", "no such setting", f"choose from {', '.join(known)}")
        return cls(**values)

    from_yaml = from_json = from_file

    def save(self, path: str | Path) -> None:
        """As JSON, which is YAML too."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    def command(self, script: str, arguments: Sequence[str] = ()) -> list[str]:
        """What to type on this node."""
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
        """True, or every problem at once."""
        problems = [*self._type_problems()]
        if not problems:
            problems += [problem for problem in self._problems() if problem is not None]
        if problems:
            raise ConfigError(problems)
        return True

    def _type_problems(self) -> list[UserError]:
        defaults = DistributedConfig()
        wanted = {f.name: type(getattr(defaults, f.name)) for f in fields(self) if f.name != "device_ids"}
        return [
            UserError(f"{name}={getattr(self, name)!r}", f"no {kind.__name__}", f"give it one of type {kind.__name__}")
            for name, kind in wanted.items()
            if type(getattr(self, name)) is not kind
        ]

    def _problems(self) -> list[UserError | None]:
        processes, ids = self.num_nodes * self.num_gpus_per_node, self.device_ids
        here = range(self.node_rank * self.num_gpus_per_node, (self.node_rank + 1) * self.num_gpus_per_node)
        far = self.num_nodes > 1 and self.master_addr in ("localhost", "127.0.0.1", "::1")
        return [
            _unless(processes == self.world_size and processes >= 1, f"world_size={self.world_size}",
                    f"num_nodes={self.num_nodes} x num_gpus_per_node={self.num_gpus_per_node} = {processes}",
                    f"set world_size to {processes}, or the other two so that they give {self.world_size}"),
            _unless(0 <= self.node_rank < self.num_nodes, f"node_rank={self.node_rank}",
                    f"num_nodes={self.num_nodes}", f"count nodes from 0 to {self.num_nodes - 1}"),
            _unless(self.rank in here, f"rank={self.rank}",
                    f"node {self.node_rank} holds the ranks {here.start} to {here.stop - 1}",
                    "rank = node_rank x num_gpus_per_node + the number of the process on its node"),
            _unless(1 <= self.master_port <= 65535, f"master_port={self.master_port}", "no port",
                    "choose 1024 to 65535"),
            _unless(not far, f"master_addr={self.master_addr} with num_nodes={self.num_nodes}",
                    "a name that every node takes for itself", "give the address of node 0"),
            _unless(self.backend in BACKENDS, f"backend={self.backend}", "one that is not supported here",
                    f"choose from {', '.join(BACKENDS)}"),
            _unless(self.launch_method in LAUNCHERS, f"launch_method={self.launch_method}", "no such launcher",
                    f"choose from {', '.join(LAUNCHERS)}"),
            _unless(ids is None or (len(set(ids)) == len(ids) >= self.num_gpus_per_node and min(ids) >= 0),
                    f"device_ids={ids}", f"{self.num_gpus_per_node} processes on this node",
                    "name a different GPU for each process, counted from 0"),
        ]  # fmt: skip


def world_size_not_set(env: Mapping[str, str]) -> UserError:
    """Going on alone would let every rank train by itself, and all of them write."""
    given = ", ".join(f"{name}={env[name]}" for name in ("RANK", "LOCAL_RANK") if name in env)
    return UserError(
        "a rank among others",
        f"WORLD_SIZE not set, but {given}",
        "use torchrun, or set RANK, WORLD_SIZE and LOCAL_RANK",
    )


def _unless(fine: bool, asked: str, found: str, fix: str) -> UserError | None:
    return None if fine else UserError(asked, found, fix)


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise UserError(f"the environment variable {name}", f"{text!r}, which is no JSON", f"unset {name}") from None


def _count(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(
            f"the environment variable {name}", f"{text!r}, which is no whole number", f"export {name}=1"
        ) from None
