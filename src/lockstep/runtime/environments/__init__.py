"""Tell a process what it is: one reader per launcher or platform, tried in the order of the tables.

A reader is a function of environment variables. It returns None if the variables of its launcher are missing, and
raises a `UserError` if they contradict each other: a rank that took itself for a single process would train alone, and
overwrite the files of the others.

`RANKS` are launchers that make a process a rank (a `World`). `NODES` are platforms that start one command on each
machine (`Nodes`), which becomes the launcher of that machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from lockstep.errors import UserError
from lockstep.runtime.environments import clouds, kubernetes, lsf, mpi, slurm, torchrun
from lockstep.runtime.environments.nodes import Nodes
from lockstep.runtime.world import World

Found = TypeVar("Found")

# The most explicit reader first: inside a Slurm job, the variables of our launcher and of torchrun take precedence, and
# `srun --mpi=pmi2` sets the variables of PMI as well.
RANKS: tuple[Callable[[Mapping[str, str]], World | None], ...] = (torchrun.read, slurm.read, lsf.read, mpi.read)

# What was set for this job alone comes first. SkyPilot may run on Kubernetes or Slurm.
NODES: tuple[Callable[[Mapping[str, str]], Nodes | None], ...] = (
    kubernetes.read_own_job,
    clouds.read_skypilot,
    kubernetes.read_kubeflow,
    clouds.read_dstack,
    clouds.read_lepton,
    clouds.read_pai_dlc,
    lsf.read_nodes,
    slurm.read_nodes,
)


def launched(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher (ours, torchrun, a hand-written one) set WORLD_SIZE, RANK and LOCAL_RANK.

    The variables of Slurm, LSF and MPI do not count here: `srun lockstep train --nproc 8` starts a launcher in each
    task, and only a plain script is itself a rank. Raises a UserError if some of the three variables are missing.
    """
    if switched_off(env):
        return False

    # Inside a Slurm step, Slurm's variables say which rank this is; a platform may mean machines.
    if not torchrun.is_rank(env) and rank_of(env) is None and _first(NODES, env) is None:
        torchrun.refuse_half_a_set(env)

    return torchrun.is_rank(env)


def switched_off(env: Mapping[str, str]) -> bool:
    return env.get("LOCKSTEP_ENVIRONMENT") == "none"


def rank_of(env: Mapping[str, str]) -> World | None:
    """Return the world of the first launcher that has made this process a rank, or None."""
    return _first(RANKS, env)


def detect(env: Mapping[str, str] = os.environ) -> World:
    """Return the world of the first reader that recognises the environment, or the world of a single process.

    `LOCKSTEP_ENVIRONMENT=none` makes every process train by itself, such as the tasks of a sweep under `srun`.
    """
    if switched_off(env):
        return World()

    found = rank_of(env)
    if found is not None:
        return found

    # The same command runs on the other machines: each process would train alone.
    nodes = _first(NODES, env)
    if nodes is None:
        torchrun.refuse_half_a_set(env)
    elif nodes.several:
        raise UserError(
            f"{nodes.platform} runs this command on {nodes.count} machines, and this process is not a rank",
            "without a launcher on each machine, each of these processes would train alone",
            "use `lockstep train TARGET --nproc auto`, or torchrun; to train alone on each machine, set "
            "LOCKSTEP_ENVIRONMENT=none",
        )

    return World()


def current_world() -> World:
    """Return this process's rank and world: from the environment, or from the process group that its script has made.

    A script may have joined by itself, such as the processes of torch.multiprocessing.spawn, in which no launcher has
    set variables.
    """
    # Without torch there is no process group, and importing torch takes seconds.
    dist = sys.modules.get("torch.distributed")
    complete = all(name in os.environ for name in torchrun.FULL_SET)
    if dist is None or not dist.is_initialized() or (complete and not switched_off(os.environ)):
        return detect()

    # Half a set of variables says less than the group.
    rank, size = dist.get_rank(), dist.get_world_size()
    started = None if switched_off(os.environ) else rank_of(os.environ)
    if started is not None and (started.rank, started.size) == (rank, size):
        return started

    # Without LOCAL_RANK we take all ranks to be on one machine.
    return World(rank, size, rank, size, launcher="the script")


def _first(readers: tuple[Callable[[Mapping[str, str]], Found | None], ...], env: Mapping[str, str]) -> Found | None:
    return next((found for read in readers if (found := read(env)) is not None), None)


# ---- what `lockstep train` starts ----


@dataclass(frozen=True)
class JobShape:
    """The processes that `lockstep train` was asked for, with what the platform adds: as typed after the options."""

    nproc: str | int | None
    nnodes: str | None
    join: str | None
    node: int | None = None  # this machine's number, if the platform says where the machines meet
    source: str = ""  # a line for people about what the platform has added

    @property
    def here(self) -> bool:
        """Whether this process trains, without a launcher."""
        return self.nproc is None and self.nnodes is None


def place(
    nproc: str | int | None, nnodes: str | None, join: str | None, env: Mapping[str, str] = os.environ
) -> JobShape:
    """Return what to start: what was typed, and what the platform says about the rest.

    Nothing that was typed is replaced. Without --nproc and --nnodes a process that is a rank trains.
    """
    placed = _place(JobShape(nproc, nnodes, join), env)

    # Each machine would train alone, into the same folder.
    if placed.join is not None and placed.nnodes is None:
        raise UserError(
            f"--join {join} needs --nnodes",
            "no number of machines",
            "add --nnodes M, the number of machines that meet there; or leave --join out",
        )

    return placed


def _place(typed: JobShape, env: Mapping[str, str]) -> JobShape:
    nproc = typed.nproc
    nnodes = typed.nnodes
    join = typed.join

    # Where nothing is left to add, or must not be, the command is taken as it was typed.
    is_complete = nnodes == "1" or (nnodes is not None and join is not None)
    is_rank = typed.here and rank_of(env) is not None
    if switched_off(env) or is_complete or is_rank:
        return typed

    nodes = _first(NODES, env)
    if nodes is None:
        _refuse_inside_a_rank(typed, env)
        return typed

    # `--nproc auto` is the number that the platform was asked for, where it says one. Without --nproc that number is
    # used too; one process on one machine needs no launcher.
    if nproc == "auto" or (nproc is None and (nodes.several or nodes.nproc != "1")):
        nproc = nodes.nproc or nproc

    if not nodes.several:
        source = f"processes from {nodes.platform}: {nproc}" if nproc != typed.nproc else ""
        return JobShape(nproc, nnodes, join, source=source)

    if nproc is None:
        raise UserError(
            f"{nodes.platform} runs this command on {nodes.count} machines, and no number of processes is given",
            "there is no --nproc",
            "add --nproc auto; to train alone on each machine, set LOCKSTEP_ENVIRONMENT=none",
        )

    # A meeting point that was typed need not be on the platform's machine 0.
    number = None if join else nodes.number
    return JobShape(nproc, nnodes or nodes.count, join or nodes.join, number, str(nodes))


def _refuse_inside_a_rank(typed: JobShape, env: Mapping[str, str]) -> None:
    """Refuse to start processes in each rank of another launcher: Lockstep's launchers would not know of each other."""
    if not torchrun.is_rank(env) and (world := rank_of(env)) is not None:
        raise UserError(
            f"--nproc cannot be used here: {world.launcher} has already made this process a rank",
            f"rank {world.rank} of {world.size}",
            "leave --nproc out; or start one process on each machine, with --nnodes M and --join HOST:PORT",
        )
