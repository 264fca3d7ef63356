"""Tell a process which rank it is: one reader per kind of launcher, tried in the order of the table.

A reader is a function from environment variables to a `World`, or to None if the variables of its launcher are missing.
It raises a `UserError` for contradictory variables: a rank that took itself for a single process would train alone, and
overwrite the files of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lockstep.runtime.environments import slurm, torchrun
from lockstep.runtime.world import World

# The most explicit reader first: inside a Slurm job, the variables of our launcher and of torchrun take precedence.
READERS: tuple[Callable[[Mapping[str, str]], World | None], ...] = (torchrun.read, slurm.read)


def launched(env: Mapping[str, str]) -> bool:
    """Return whether a launcher (ours, torchrun, a hand-written one) set WORLD_SIZE, RANK and LOCAL_RANK.

    Slurm's variables do not count here: `srun lockstep train --nproc 8 --nnodes 2 --join ...` starts a launcher in each
    task, and only a plain script is itself a rank. Raises a UserError if some of the three variables are missing.
    """
    if switched_off(env):
        return False

    # Inside a Slurm step, Slurm's variables say which rank this is.
    if not torchrun.is_rank(env) and slurm.read(env) is None:
        torchrun.refuse_half_a_set(env)

    return torchrun.is_rank(env)


def switched_off(env: Mapping[str, str]) -> bool:
    return env.get("LOCKSTEP_ENVIRONMENT") == "none"


def detect(env: Mapping[str, str]) -> World:
    """Return the world of the first reader that recognises the environment, or the world of a single process.

    `LOCKSTEP_ENVIRONMENT=none` makes every process train by itself, such as the tasks of a sweep under `srun`.
    """
    if switched_off(env):
        return World()

    worlds = (read(env) for read in READERS)
    found = next((world for world in worlds if world is not None), None)
    if found is None:
        torchrun.refuse_half_a_set(env)

    return found or World()
