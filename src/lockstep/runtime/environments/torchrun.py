"""RANK, WORLD_SIZE and their relatives: what torchrun, our own launcher and most hand-written ones set."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.errors import UserError
from lockstep.runtime.world import World, whole_number

# Rank 0 inherits our launcher's listening socket: no port is ever guessed.
LISTEN_FD = "LOCKSTEP_LISTEN_FD"


def read(env: Mapping[str, str]) -> World | None:
    if not World.launched(env):
        return None

    rank = whole_number(env, "RANK")
    size = whole_number(env, "WORLD_SIZE")
    if not 0 <= rank < size:
        raise UserError(
            f"RANK={rank} is not a rank of WORLD_SIZE={size}",
            "ranks go from 0 to WORLD_SIZE - 1",
            "start the processes with `lockstep train --nproc N` or torchrun, or correct the two variables",
        )

    listen_fd = env.get(LISTEN_FD)

    return World(
        rank=rank,
        size=size,
        local_rank=whole_number(env, "LOCAL_RANK", rank),
        local_size=whole_number(env, "LOCAL_WORLD_SIZE", size),
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=whole_number(env, "MASTER_PORT", 29500),
        listen_fd=int(listen_fd) if listen_fd and rank == 0 else None,
    )
