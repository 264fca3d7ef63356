"""Tell a process which rank it is: one reader per kind of launcher, tried in the order of the table.

A reader is a function from environment variables to a `World`, or to None if the variables of its launcher are missing.
It raises a `UserError` for variables that make no sense: a rank that took itself for a single process would train
alone, and overwrite what the others write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lockstep.runtime.environments import slurm, torchrun
from lockstep.runtime.world import World

# The most explicit first: inside a Slurm job, the variables of our own launcher and of torchrun win.
READERS: tuple[Callable[[Mapping[str, str]], World | None], ...] = (torchrun.read, slurm.read)


def detect(env: Mapping[str, str]) -> World:
    """Return the world of the first reader that recognises the environment, or that of a single process.

    `LOCKSTEP_ENVIRONMENT=none` makes every process train by itself, such as the tasks of a sweep under `srun`.
    """
    if env.get("LOCKSTEP_ENVIRONMENT") == "none":
        return World()

    worlds = (read(env) for read in READERS)
    return next((world for world in worlds if world is not None), World())
