"""The AMPTrainer on several ranks: gradients are all-reduced, and all ranks have one loss scale."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.classic.amp_config import AMPConfig
from lockstep.classic.amp_trainer import AMPTrainer, LossFn, make_runtime
from lockstep.classic.ddp_manager import wrap_in_ddp
from lockstep.classic.distributed_config import DistributedConfig
from lockstep.classic.process_group import GroupMembership, check_announced, started_world, time_limit
from lockstep.classic.rank_log import RankLog
from lockstep.errors import UserError
from lockstep.runtime import environments
from lockstep.runtime.context import Runtime, choose_device
from lockstep.runtime.world import World
from lockstep.task import Loss, StepResult

# Numbers the trainers that have other ranks. They are made together, so all ranks count alike.
_TRAINERS = count(1)


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
        timeout_mins: float = 30,
        log_dir: str | Path | None = None,
    ):
        """Join the other ranks. `nccl` becomes gloo where ranks share a GPU or have none.

        `distributed` replaces the four arguments before it, and has options of DDP. A rank waits `timeout_mins` for
        the others at most, and then raises; a process group that the script has joined keeps its own limit. With
        `log_dir` every rank writes a line for each step to its own file there.
        """
        # In a DistributedConfig `device_ids` name the devices of all processes of this machine.
        self._ids_of_node = distributed is not None

        if distributed is not None:
            distributed.validate()
        else:
            distributed = DistributedConfig(world_size, rank, backend, device_ids=device_ids)
            distributed.check_values()

        self.distributed = distributed
        self.rank = distributed.rank
        self.world_size = distributed.world_size
        self.time_limit = time_limit(timeout_mins)

        self._membership = GroupMembership()
        super().__init__(model, config, optimizer=optimizer, loss_fn=loss_fn)

        self.log = RankLog(log_dir, self.rank, self.runtime.device) if log_dir is not None else None

    def setup(self) -> Runtime:
        return self.setup_distributed()

    def setup_distributed(self) -> Runtime:
        """Choose the device and join the process group, unless this process has already done so."""
        if hasattr(self, "runtime"):
            return self.runtime

        world = _find_world(self.distributed)
        device = choose_device(self.config.device, world)
        if device.type == "cuda":
            # By the configuration's GPUs, if it names some.
            device = torch.device("cuda", own_gpu(self.distributed.device_ids, world, self._ids_of_node, device.index))

        backend = self._membership.join(world, device, self.distributed.backend, self.time_limit)

        # The launcher or the process group decides where the arguments were left out.
        self.rank = world.rank
        self.world_size = world.size
        if not world.alone:
            self.number = next(_TRAINERS)

        return make_runtime(world, device, backend)

    def settings(self) -> dict[str, Any]:
        return self.distributed.ddp_settings()

    def wrap_own(self, model: nn.Module) -> nn.Module:
        return model if self.runtime.world.alone else ReducedByTheStep(model)

    def wrap_other(self, model: nn.Module) -> nn.Module:
        """Wrap a second model, which the step of this trainer does not reduce, in torch's DDP."""
        if self.runtime.world.alone:
            return model

        options = self.distributed
        return wrap_in_ddp(
            model, options.find_unused_parameters, options.broadcast_buffers, options.gradient_as_bucket_view
        )

    def save_checkpoint(self, path: str | Path, rank: int = 0) -> Path:
        if self.log:
            self.log.flush()

        return super().save_checkpoint(path, rank)

    def cleanup(self) -> None:
        """Close the log, and leave the process group that this trainer joined."""
        if self.log:
            self.log.conclude(self.stepper.read_late_outcome())
            self.log.close()
            self.log = None

        self._membership.leave(self.runtime.world, self.runtime.device)

    @staticmethod
    def is_distributed() -> bool:
        """Return whether this process is one rank of several."""
        # A process group that exists counts more than the environment.
        if dist.is_initialized():
            return dist.get_world_size() > 1

        check_announced()
        return not environments.detect().alone

    def _micro_step(self, batch: Any, padding: bool = False, exhausted: bool = False) -> tuple[Loss, StepResult | None]:
        loss, result = super()._micro_step(batch, padding, exhausted)
        if self.log:
            if not padding:
                self.log.add(loss)

            # The step has ended with this batch.
            if self._open_step is None:
                scale = self.scaler.value if self.scaler else None
                self.log.end_step(self.stepper.steps_done - 1, result, scale=scale)

        return loss, result


class ReducedByTheStep(DistributedDataParallel):
    """DDP by its type, with the attributes, parameter names and state dict of the model.

    It reduces nothing: the step does, whichever of the two is called.
    """

    def __init__(self, model: nn.Module):
        nn.Module.__init__(self)
        self.find_unused_parameters = True
        self.require_backward_grad_sync = False
        self.module = model  # from here on, `__setattr__` forwards attributes to it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Not `self.module`: before it is set, that would come here again.
            return getattr(super().__getattr__("module"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        model = self.__dict__.get("_modules", {}).get("module")
        if model is not None and name not in self.__dict__ and hasattr(model, name):
            setattr(model, name, value)
        else:
            super().__setattr__(name, value)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


def own_gpu(ids: Sequence[int] | None, world: World, of_node: bool, usual: int) -> int:
    """Return the GPU of this process: the first of its own `ids`, or the one at its local rank among the machine's."""
    if not ids:
        return usual

    if not of_node:
        return ids[0]

    # Where only these are visible, as `DistributedConfig.to_env_dict` asks for, they are counted from 0.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") == ",".join(map(str, ids))
    return world.local_rank if visible else ids[world.local_rank]


def _find_world(config: DistributedConfig) -> World:
    """Return the ranks of the process group, the environment or the configuration, in this order."""
    # Arguments that name other ranks complete what the environment leaves out.
    if not dist.is_initialized() and config.world_size == 1:
        check_announced()

    world = started_world()
    if world is not None:
        if problem := config.contradiction(world):
            raise problem

        return world

    if config.world_size == 1:
        return World()

    given = {"RANK": str(config.rank), "WORLD_SIZE": str(config.world_size)}
    for name, value in given.items():
        if os.environ.get(name, value) != value:
            raise UserError(
                f"rank={config.rank}, world_size={config.world_size} were given, but {name}={os.environ[name]} is set",
                "",
                f"unset {name}, or start the ranks with torchrun and leave rank and world_size out",
            )

    # Without a launcher, the configuration says what torchrun's variables would. Other variables that are set win.
    env = given | {
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", config.master_addr),
        "MASTER_PORT": os.environ.get("MASTER_PORT", str(config.master_port)),
        "LOCAL_RANK": os.environ.get("LOCAL_RANK", str(config.local_rank if config.knows_nodes else config.rank)),
    }
    return environments.detect(env)
