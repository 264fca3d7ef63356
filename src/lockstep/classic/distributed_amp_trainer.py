"""The AMPTrainer on several ranks: gradients are exchanged, and the loss scale is one for all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.classic.amp_config import AMPConfig
from lockstep.classic.amp_trainer import AMPTrainer, LossFn, alone_or_among
from lockstep.classic.distributed_config import DistributedConfig, world_size_not_set
from lockstep.errors import UserError
from lockstep.runtime.context import Runtime, choose_device, join
from lockstep.runtime.world import World


class DistributedAMPTrainer(AMPTrainer):
    """The arguments of one rank. Under torchrun or Lockstep's launcher `rank` and `world_size` may be left out.

    `training_step` is the base's: weights, overflows and the loss scale travel with the gradients, so every rank
    divides by the same number, and skips or steps with the others. Ranks may bring batches of different size.
    """

    def __init__(
        self,
        model: nn.Module,
        config: AMPConfig | None = None,
        rank: int = 0,
        world_size: int = 1,
        backend: str = "nccl",
        device_ids: list[int] | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        loss_fn: LossFn | None = None,
        distributed: DistributedConfig | None = None,
    ):
        """`backend`: nccl, where every rank has a GPU of its own, else gloo; or gloo everywhere. `distributed` replaces
        the four arguments before it, and says how DDP works."""
        given = distributed or DistributedConfig(world_size, rank, backend, device_ids=device_ids)
        self._of_node = distributed is not None  # whether `device_ids` are those of all processes of this machine
        if distributed is not None:
            distributed.validate()
        self.distributed, self.rank, self.world_size = given, given.rank, given.world_size
        self._joined = False
        super().__init__(model, config, optimizer=optimizer, loss_fn=loss_fn)

    def setup(self) -> Runtime:
        return self.setup_distributed()

    def setup_distributed(self) -> Runtime:
        """Join the process group, unless this process has joined one already, and choose the device."""
        given = self.distributed
        world = _world(given)
        device = choose_device(self.config.device, world)
        if device.type == "cuda":
            device = torch.device("cuda", own_gpu(given.device_ids, world, self._of_node, device.index))
            torch.cuda.set_device(device)
        if dist.is_initialized():
            backend = dist.get_backend()
        else:
            backend = join(world, device, asked="gloo" if given.backend == "gloo" else "auto")
            self._joined = backend != "none"
        self.rank, self.world_size = world.rank, world.size
        return alone_or_among(world, device, backend)

    def settings(self) -> dict[str, Any]:
        return {
            "ddp.find_unused_parameters": self.distributed.find_unused_parameters,
            "ddp.broadcast_buffers": self.distributed.broadcast_buffers,
            "ddp.gradient_as_bucket_view": self.distributed.gradient_as_bucket_view,
        }

    def save_checkpoint(self, path: str | Path, rank: int = 0) -> Path:
        """Written by `rank` only; every rank must call it, and all leave when it is committed."""
        return super().save_checkpoint(path, rank)

    def cleanup(self) -> None:
        """Leave the process group that this trainer joined."""
        if self._joined:
            self.runtime.collectives.farewell()
            dist.destroy_process_group()
            self._joined = False

    @staticmethod
    def is_distributed() -> bool:
        """Whether this process is one rank of several."""
        if dist.is_initialized():
            return dist.get_world_size() > 1
        return World.launched() and World.from_env().size > 1


def own_gpu(ids: Sequence[int] | None, world: World, of_node: bool, usual: int) -> int:
    """The GPU of this process: the first of its own, or its own of those of the machine. Where only the latter are
    visible, as `DistributedConfig.to_env_dict` asks for, they are counted from 0."""
    if not ids:
        return usual
    if not of_node:
        return ids[0]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") == ",".join(map(str, ids))
    return world.local_rank if visible else ids[world.local_rank]


def _world(given: DistributedConfig) -> World:
    """As the process group, the environment or the arguments say; never as one process where several were announced."""
    env = os.environ
    if dist.is_initialized():
        return _matching(given, World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size()))
    if World.launched():
        return _matching(given, World.from_env())
    if "WORLD_SIZE" not in env and "RANK" in env:
        raise world_size_not_set(env)
    if given.world_size == 1:
        return World()
    local = given.local_rank if given.world_size == given.num_nodes * given.num_gpus_per_node else given.rank
    place = {"MASTER_ADDR": given.master_addr, "MASTER_PORT": str(given.master_port)}
    place = {name: env.get(name, text) for name, text in place.items()}
    said = {"RANK": str(given.rank), "WORLD_SIZE": str(given.world_size), "LOCAL_RANK": str(local)}
    return World.from_env(place | said)


def _matching(given: DistributedConfig, found: World) -> World:
    if (given.rank, given.world_size) not in ((0, 1), (found.rank, found.size)):
        raise UserError(
            f"rank={given.rank}, world_size={given.world_size}",
            f"a process that was started as rank {found.rank} of {found.size}",
            "leave rank and world_size out: they are found",
        )
    return found
