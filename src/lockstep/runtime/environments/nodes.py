"""What a platform says about the machines of a job, and the parts that several readers of its variables share."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.errors import UserError, plural
from lockstep.runtime.host.network import join_host_port
from lockstep.runtime.world import whole_number

# Ports for a rendezvous without a given port, below the ports that systems assign automatically (32768 and up on
# Linux).
FIRST_PORT = 10_000
PORTS = 20_000


@dataclass(frozen=True)
class Nodes:
    """The machines of a job, as a platform describes them to the launcher on one of them."""

    platform: str  # its name, for people
    count: str  # how many machines, as --nnodes takes it: "2" or "1:4"
    number: int | None = None  # this machine's; number 0 is where the machines meet; None: the platform does not say
    join: str | None = None  # where they meet, as --join takes it: HOST:PORT
    nproc: str | None = None  # processes on each machine: a count or "auto"; None: the platform does not say
    restarts: int = 0  # how often the platform has started this job before

    @property
    def several(self) -> bool:
        return self.count != "1"

    def __str__(self) -> str:
        """`nodes from SkyPilot: 2, this one 0, meeting at 10.0.0.1:12345`"""
        number = "" if self.number is None else f", this one {self.number}"
        again = f"; {plural(self.restarts, 'restart')} before this one" if self.restarts else ""
        return f"nodes from {self.platform}: {self.count}{number}, meeting at {self.join}{again}"


def make_nodes(
    platform: str,
    env: Mapping[str, str],
    count_name: str,
    number_name: str,
    host: str,
    port: int,
    nproc_name: str = "",
    restarts_name: str = "",
) -> Nodes:
    """Return the nodes of a platform that counts its machines in one variable and numbers them in another."""
    count, most = count_or_range(env, count_name)
    number = whole_number(env, number_name, 0 if most == 1 else None)
    check_number(f"{number_name}={number}", number, f"{count_name}={count}", most)
    return Nodes(
        platform,
        count,
        number,
        join_host_port(host, port) if most > 1 else None,
        count_or_auto(env, nproc_name) if nproc_name else None,
        whole_number(env, restarts_name, 0) if restarts_name else 0,
    )


def check_number(number_text: str, number: int, count_text: str, count: int) -> None:
    """Refuse a number that is not from 0 to `count` - 1; the texts say which variables it comes from."""
    if not 0 <= number < count:
        raise UserError(
            f"{number_text} is not a machine of {count_text}",
            "machines are numbered from 0",
            "correct the two variables; or unset them, and use --nnodes M and --join HOST:PORT",
        )


def require(platform: str, env: Mapping[str, str], names: Sequence[str]) -> None:
    """Raise a UserError if some of the variables of a platform are missing."""
    missing = [name for name in names if not env.get(name)]
    if missing:
        found = ", ".join(f"{name}={env[name]}" for name in names if env.get(name))
        raise UserError(
            f"the variables of {platform} are not complete: {' and '.join(missing)} not set",
            found,
            "set what is missing; or use --nnodes M and --join HOST:PORT; to use this machine alone, set "
            "LOCKSTEP_ENVIRONMENT=none",
        )


def count_or_range(env: Mapping[str, str], name: str) -> tuple[str, int]:
    """Return a number of machines as --nnodes takes it, "2" or "1:4", and the most that it allows."""
    text = env.get(name, "")
    least, colon, most = text.partition(":")
    if not colon:
        most = least = str(whole_number(env, name))
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise UserError(f"{name}={text} is not a number of machines", "neither a count nor a range", f"set {name}=2")

    return (least if least == most else f"{least}:{most}"), int(most)


def count_or_auto(env: Mapping[str, str], name: str) -> str | None:
    """Return a number of processes, or "auto"; None if the variable is not set, or is 0, on a machine without GPUs."""
    text = env.get(name, "")
    if text in ("", "0"):
        return None

    # As torchrun takes them.
    if text in ("auto", "gpu"):
        return "auto"
    if text == "cpu":
        return str(os.cpu_count() or 1)

    # A share of a GPU is enough for one process.
    return "1" if re.fullmatch(r"0?\.\d*[1-9]\d*", text, re.ASCII) else str(whole_number(env, name))


def port_of(*job: str) -> int:
    """Return a port that all machines of a job compute alike, and that other jobs most likely do not."""
    return FIRST_PORT + zlib.crc32(" ".join(job).encode()) % PORTS
