"""The process group of a script: the one that the script joined, or one that we join and leave again.

`DDPManager` and `DistributedAMPTrainer` share this. Neither makes up a WORLD_SIZE, and neither continues alone after a
failed start: ranks that each believe they are alone would all train, and all write.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.errors import UserError
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import join
from lockstep.runtime.environments import slurm
from lockstep.runtime.world import World


class Membership:
    """The membership of this process in a process group. It leaves only a group that it joined itself."""

    _joined = False

    def join(
        self,
        world: World,
        device: torch.device,
        backend: str,
        timeout: timedelta | None = None,
    ) -> str:
        """Join the ranks of `world`, unless this process is in a group already. Returns the name of the backend.

        `nccl` becomes gloo where ranks share a GPU or have none.
        """
        if device.type == "cuda":
            # Before anything touches CUDA, or every rank opens a context on GPU 0.
            torch.cuda.set_device(device)
        if dist.is_initialized():
            return dist.get_backend()

        joined = join(world, device, asked="gloo" if backend == "gloo" else "auto", timeout=timeout)
        self._joined = joined != "none"
        return joined

    def leave(self, world: World, device: torch.device) -> None:
        """Leave together with the other ranks. Collective, if this object joined."""
        if self._joined:
            Collectives(world, device).final_barrier()
            dist.destroy_process_group()
            self._joined = False


def current_world() -> World:
    """Return this process's rank and world, from the environment or the process group it is in."""
    world = World.from_env()
    if dist.is_initialized() and not World.launched():
        rank, size = dist.get_rank(), dist.get_world_size()
        if (world.rank, world.size) != (rank, size):
            # The script joined by itself. Without LOCAL_RANK we take all ranks to be on one machine.
            return World(rank, size, rank, size)
    return world


def check_announced(env: Mapping[str, str] = os.environ) -> None:
    """Refuse an environment that announces ranks, but does not say how many there are or which one this process is.

    Continuing alone would let every rank train and write by itself.
    """
    found = [f"{name}={env[name]}" for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK") if name in env]
    missing = [name for name in ("WORLD_SIZE", "RANK") if name not in env]
    # A WORLD_SIZE of 1 announces nobody.
    if not found or not missing or found == ["WORLD_SIZE=1"] or env.get("LOCKSTEP_ENVIRONMENT") == "none":
        return

    # Scripts of Slurm often export WORLD_SIZE, and `srun` gives every process its number.
    started = slurm.read(env)
    if started is not None and found == [f"WORLD_SIZE={started.size}"]:
        return
    raise UserError(
        f"{missing[0]} is not set, but {' and '.join(found)} {'is' if len(found) == 1 else 'are'}",
        "a process that does not know its rank would train alone, and so would all the others",
        "use torchrun, or set RANK, WORLD_SIZE and LOCAL_RANK for every process",
    )
