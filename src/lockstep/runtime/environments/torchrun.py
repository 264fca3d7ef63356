"""RANK, WORLD_SIZE, LOCAL_RANK and related variables, which torchrun, our launcher and hand-written launchers set."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.errors import UserError
from lockstep.runtime.environments.launcher import STORE_FILE, STORE_KEY_FILE, STORE_PORT, TORCHRUN_ID, from_launcher
from lockstep.runtime.world import World, whole_number

# Set by Ray in its workers; Ray Train sets RANK and its relatives there.
RAY_WORKER = "RAY_RAYLET_PID"

# The variables that make a process a rank. The first two alone may describe a machine: some clouds set them so.
FULL_SET = ("WORLD_SIZE", "RANK", "LOCAL_RANK")


def is_rank(env: Mapping[str, str]) -> bool:
    """Return whether a launcher has made this process a rank."""
    return all(name in env for name in FULL_SET)


def refuse_half_a_set(env: Mapping[str, str]) -> None:
    """Raise a UserError if the variables describe several ranks, or machines, but not which rank this process is."""
    # With one rank, or one machine, there is no doubt.
    announced = [f"{name}={env[name]}" for name in FULL_SET[:2] if name in env]
    if is_rank(env) or not announced or announced in (["WORLD_SIZE=1"], ["WORLD_SIZE=1", "RANK=0"]):
        return

    missing = [name for name in FULL_SET if name not in env]
    raise UserError(
        f"{' and '.join(announced)} in the environment: that does not say which rank this process is",
        f"{' and '.join(missing)} not set: some clouds set the others for each machine, not for each process",
        "start the ranks with torchrun, or set WORLD_SIZE, RANK and LOCAL_RANK for each; on several machines, use "
        "--nproc N --nnodes M --join HOST:PORT; to train alone, set LOCKSTEP_ENVIRONMENT=none",
    )


def read(env: Mapping[str, str]) -> World | None:
    if not is_rank(env):
        return None

    rank = whole_number(env, "RANK")
    size = whole_number(env, "WORLD_SIZE")
    if not 0 <= rank < size:
        raise UserError(
            f"RANK={rank} is not a rank of WORLD_SIZE={size}",
            "ranks go from 0 to WORLD_SIZE - 1",
            "start the processes with `lockstep train --nproc N` or torchrun, or correct the two variables",
        )

    ours = {name: value for name in (STORE_FILE, STORE_KEY_FILE, STORE_PORT) if (value := from_launcher(name, env))}
    return World(
        rank=rank,
        size=size,
        local_rank=whole_number(env, "LOCAL_RANK"),
        local_size=whole_number(env, "LOCAL_WORLD_SIZE", size),
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=whole_number(env, "MASTER_PORT", 29500),
        store_file=ours.get(STORE_FILE),
        key_file=ours.get(STORE_KEY_FILE),
        store_port=whole_number(ours, STORE_PORT, 0),
        launcher=_launcher(env),
    )


def _launcher(env: Mapping[str, str]) -> str:
    if TORCHRUN_ID in env:
        return "torchrun"
    if STORE_FILE in env or STORE_KEY_FILE in env:
        return "lockstep"

    return "Ray Train" if RAY_WORKER in env else "RANK and WORLD_SIZE"
