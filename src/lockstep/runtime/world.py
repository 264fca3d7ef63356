"""Rank facts, read from the environment once, at the edge."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import UserError

LISTEN_FD = "LOCKSTEP_LISTEN_FD"  # rank 0 inherits the launcher's listening socket: no port is ever guessed


@dataclass(frozen=True)
class World:
    """One process among `size`. `local_*` count the processes of this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    listen_fd: int | None = None

    @property
    def alone(self) -> bool:
        return self.size == 1

    @staticmethod
    def launched(env: Mapping[str, str] = os.environ) -> bool:
        """Whether some launcher (ours, torchrun, a hand-written one) has already made this process a rank."""
        return "RANK" in env and "WORLD_SIZE" in env

    @staticmethod
    def from_env(env: Mapping[str, str] = os.environ) -> World:
        if not World.launched(env):
            return World()
        rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        if not 0 <= rank < size:
            raise UserError(
                f"RANK={rank} in a world of WORLD_SIZE={size}",
                "a rank outside 0 .. WORLD_SIZE - 1",
                "start the processes with `lockstep train --nproc N` or torchrun, or correct the two variables",
            )
        listen_fd = env.get(LISTEN_FD)
        return World(
            rank=rank,
            size=size,
            local_rank=_number(env, "LOCAL_RANK", rank),
            local_size=_number(env, "LOCAL_WORLD_SIZE", size),
            master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
            master_port=_number(env, "MASTER_PORT", 29500),
            listen_fd=int(listen_fd) if listen_fd and rank == 0 else None,
        )


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UserError(
            f"the environment variable {name}", f"{text!r}, which is no whole number", f"export {name}=0"
        ) from None
