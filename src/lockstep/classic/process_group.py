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

from lockstep.errors import UserError, unknown_name
from lockstep.runtime import environments
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.context import join
from lockstep.runtime.environments import current_world, rank_of, switched_off
from lockstep.runtime.world import World

BACKENDS = ("nccl", "gloo", "auto", "cpu:gloo,cuda:nccl", "mpi")


class GroupMembership:
    """The membership of this process in a process group. It leaves only a group that it joined itself."""

    _joined = False

    def join(
        self,
        world: World,
        device: torch.device,
        backend: str,
        timeout: timedelta | None = None,
    ) -> str:
        """Join the ranks of `world`, unless this process is in a group already. Return the name of the backend.

        `nccl` becomes gloo where ranks share a GPU or have none.
        """
        if backend not in BACKENDS:
            raise unknown_name("backend", backend, BACKENDS)

        if device.type == "cuda":
            # Before anything touches CUDA, or every rank opens a context on GPU 0.
            torch.cuda.set_device(device)

        if dist.is_initialized():
            return dist.get_backend()

        joined = join(world, device, asked="auto" if backend == "nccl" else backend, timeout=timeout)
        self._joined = joined != "none"
        return joined

    def leave(self, world: World, device: torch.device) -> None:
        """Leave together with the other ranks. Collective, if this object joined."""
        if self._joined:
            # No rank may leave while another is still in a collective; the pause is for gloo's threads.
            collectives = Collectives(world, device)
            collectives.final_barrier()
            collectives.pause()
            dist.destroy_process_group()
            self._joined = False


def started_world() -> World | None:
    """Return this process's rank and world if it is in a process group, or a launcher made it a rank; else None."""
    world = current_world()
    return world if dist.is_initialized() or environments.launched() or not world.alone else None


def time_limit(minutes: float) -> timedelta:
    """Return how long a rank waits for the others."""
    try:
        limit = timedelta(minutes=minutes)
    except (TypeError, ValueError, OverflowError):
        limit = timedelta(0)

    if limit <= timedelta(0):
        raise UserError(f"timeout_mins={minutes!r} is not a time limit", "", "set timeout_mins=30")

    return limit


def check_announced(env: Mapping[str, str] = os.environ) -> None:
    """Refuse an environment that announces ranks, but does not say how many there are or which one this process is.

    Continuing alone would let every rank train and write by itself.
    """
    found = [f"{name}={env[name]}" for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK") if name in env]
    missing = [name for name in ("WORLD_SIZE", "RANK") if name not in env]
    # A WORLD_SIZE of 1 announces no other rank.
    if not found or found == ["WORLD_SIZE=1"] or switched_off(env):
        return

    if not missing:
        # Without LOCAL_RANK they may have been set once for each machine.
        environments.detect(env)
        return

    # Scripts of Slurm often export WORLD_SIZE, and `srun` gives every process its number.
    started = rank_of(env)
    if started is not None and found == [f"WORLD_SIZE={started.size}"]:
        return

    raise UserError(
        f"{missing[0]} is not set, but {' and '.join(found)} {'is' if len(found) == 1 else 'are'}",
        "without its rank this process would train alone, and so would all the others",
        "use torchrun, or set RANK, WORLD_SIZE and LOCAL_RANK for every process",
    )
