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
    if dist.is_initialized() and not World.launched():
        # The script joined by itself. Without LOCAL_RANK we take all ranks to be on one machine.
        rank, size = dist.get_rank(), dist.get_world_size()
        return World(rank, size, rank, size)
    return World.from_env()


def require_world_size(env: Mapping[str, str] = os.environ) -> None:
    """Refuse an environment that makes this process a rank without saying of how many."""
    # Continuing alone would let every rank train and write by itself.
    present = [f"{name}={env[name]}" for name in ("RANK", "LOCAL_RANK") if name in env]
    missing = [name for name in ("WORLD_SIZE", "RANK") if name not in env]
    if present and missing:
        raise UserError(
            f"{missing[0]} is not set, but {', '.join(present)} is",
            "",
            "use torchrun, or set RANK, WORLD_SIZE and LOCAL_RANK",
        )
