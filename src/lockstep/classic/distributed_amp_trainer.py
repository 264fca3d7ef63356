"""The AMPTrainer on several ranks: gradients are all-reduced, and all ranks have one loss scale."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.classic.amp_config import AMPConfig
from lockstep.classic.amp_trainer import AMPTrainer, LossFn, make_runtime
from lockstep.classic.distributed_config import DistributedConfig
from lockstep.classic.process_group import Membership, current_world, require_world_size
from lockstep.errors import UserError
from lockstep.runtime.context import Runtime, choose_device
from lockstep.runtime.world import World


class DistributedAMPTrainer(AMPTrainer):
    """The trainer of one rank. Under torchrun or Lockstep's launcher `rank` and `world_size` may be left out.

    `training_step` is the base class's. Weights, overflows and the loss scale are part of the step's control word, so
    every rank divides by the same number, and skips or steps with the others. Ranks may bring batches of different
    size.
    """

    def __init__(
        self,
        model: torch.nn.Module,
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
        """Join the other ranks. `nccl` becomes gloo where ranks share a GPU or have none.

        `distributed` replaces the four arguments before it, and has options of DDP.
        """
        # In a DistributedConfig `device_ids` are those of all processes of this machine.
        self._ids_of_node = distributed is not None
        if distributed is not None:
            distributed.validate()
        else:
            distributed = DistributedConfig(world_size, rank, backend, device_ids=device_ids)
        self.distributed = distributed
        self.rank = distributed.rank
        self.world_size = distributed.world_size
        self._membership = Membership()
        super().__init__(model, config, optimizer=optimizer, loss_fn=loss_fn)

    def setup(self) -> Runtime:
        return self.setup_distributed()

    def setup_distributed(self) -> Runtime:
        """Choose the device and join the process group unless this process is in one already."""
        world = _find_world(self.distributed)
        device = choose_device(self.config.device, world)
        if device.type == "cuda":
            # By the configuration's GPUs, if it names some.
            device = torch.device("cuda", own_gpu(self.distributed.device_ids, world, self._ids_of_node, device.index))
        backend = self._membership.join(world, device, self.distributed.backend)

        # The launcher or the process group decides where the arguments were left out.
        self.rank = world.rank
        self.world_size = world.size
        return make_runtime(world, device, backend)

    def settings(self) -> dict[str, Any]:
        return {
            "ddp.find_unused_parameters": self.distributed.find_unused_parameters,
            "ddp.broadcast_buffers": self.distributed.broadcast_buffers,
            "ddp.gradient_as_bucket_view": self.distributed.gradient_as_bucket_view,
        }

    def cleanup(self) -> None:
        """Leave the process group that this trainer joined."""
        self._membership.leave(self.runtime.world, self.runtime.device)

    @staticmethod
    def is_distributed() -> bool:
        """Return whether this process is one rank of several."""
        # The process group knows better than the environment.
        if dist.is_initialized():
            return dist.get_world_size() > 1
        return World.launched() and World.from_env().size > 1


def own_gpu(ids: Sequence[int] | None, world: World, of_node: bool, usual: int) -> int:
    """Return the GPU of this process: the first of its own `ids`, or its own among those of the machine."""
    if not ids:
        return usual
    if not of_node:
        return ids[0]

    # Where only these are visible, as `DistributedConfig.to_env_dict` asks for, they are counted from 0.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") == ",".join(map(str, ids))
    return world.local_rank if visible else ids[world.local_rank]


def _find_world(config: DistributedConfig) -> World:
    """Return the ranks of the process group, the environment or the configuration, in this order."""
    if dist.is_initialized() or World.launched():
        world = current_world()

        # The defaults contradict nothing.
        if (config.rank, config.world_size) not in ((0, 1), (world.rank, world.size)):
            raise UserError(
                f"rank={config.rank}, world_size={config.world_size} were given to a process that was started as rank "
                f"{world.rank} of {world.size}",
                "",
                "leave rank and world_size out: they are found",
            )
        return world

    require_world_size()
    if config.world_size == 1:
        return World()

    # Without a launcher, the configuration says what torchrun's variables would. Variables that are set win.
    on_nodes = config.world_size == config.num_nodes * config.num_gpus_per_node
    return World.from_env(
        {
            "MASTER_ADDR": os.environ.get("MASTER_ADDR", config.master_addr),
            "MASTER_PORT": os.environ.get("MASTER_PORT", str(config.master_port)),
            "RANK": str(config.rank),
            "WORLD_SIZE": str(config.world_size),
            "LOCAL_RANK": str(config.local_rank if on_nodes else config.rank),
        }
    )
