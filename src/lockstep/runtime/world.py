"""The rank of this process and its world size, read from the environment once, at the start."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.errors import UserError


@dataclass(frozen=True)
class World:
    """A rank, and the number of all ranks (`size`); `local_*` refer to the ranks of this machine.

    `master_addr` and `master_port` are where torch's own store is, if the ranks use it.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_addr: str | None = None
    master_port: int | None = None

    # Under our launcher only. On one machine, the file of the ranks' store; on several, the file with the store's key,
    # and the store's port at `master_addr`. Our launcher leaves `master_port` to the user's script.
    store_file: str | None = None
    key_file: str | None = None
    store_port: int = 0

    # What has made this process a rank, for people: "torchrun", "srun", ...; "lockstep" is our own launcher.
    launcher: str = field(default="", compare=False)

    @property
    def alone(self) -> bool:
        return self.size == 1

    @staticmethod
    def launched(env: Mapping[str, str] = os.environ) -> bool:
        """Return whether a launcher made this process a rank: see `environments.launched`."""
        # Imported here, because the readers import this module.
        from lockstep.runtime import environments

        return environments.launched(env)

    @staticmethod
    def from_env(env: Mapping[str, str] = os.environ) -> World:
        """Return the world that the environment describes, or the world of a single process."""
        from lockstep.runtime import environments

        return environments.detect(env)


def current_world() -> World:
    """Return this process's rank and world: from the environment, or from the process group that its script has made.

    A script may have joined by itself, such as the processes of torch.multiprocessing.spawn, in which no launcher has
    set variables.
    """
    from lockstep.runtime import environments

    # Without torch there is no process group, and importing torch takes seconds.
    dist = sys.modules.get("torch.distributed")
    complete = all(name in os.environ for name in environments.torchrun.FULL_SET)
    if dist is None or not dist.is_initialized() or (complete and not environments.switched_off(os.environ)):
        return World.from_env()

    # Half a set of variables says less than the group.
    rank, size = dist.get_rank(), dist.get_world_size()
    started = None if environments.switched_off(os.environ) else environments.rank_of(os.environ)
    if started is not None and (started.rank, started.size) == (rank, size):
        return started

    # Without LOCAL_RANK we take all ranks to be on one machine.
    return World(rank, size, rank, size, launcher="the script")


def whole_number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the environment variable as an int, or `default` if it is not set."""
    value = env.get(name, default)
    try:
        return int("" if value is None else value)
    except ValueError:
        raise UserError(
            f"the environment variable {name} must be a whole number",
            f"{name}={value!r}" if value is not None else f"{name} is not set",
            f"set {name} as your launcher does, or unset it",
        ) from None
