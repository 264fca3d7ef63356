"""The rank of a process and its world size: `environments` reads them, once, at the start."""

from __future__ import annotations

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
