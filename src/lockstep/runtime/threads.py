"""How many CPU threads a rank computes with.

Threads meet after every kernel. On cores that others use as well, one of them is often not running then, and the rest
wait for it: a small model was 30 times slower with two threads than with one. So the number is chosen by the size of
the work, and is one for a small model with small samples. It is not measured, because it decides the order in which
kernels add, and a run that is repeated must choose alike.

Nothing here imports torch: what OpenMP reads from the environment must be there before torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Self

from lockstep.errors import plural
from lockstep.runtime.machine import available_cores, hardware_counts

NUMBER = "OMP_NUM_THREADS"

# What the launcher has put into OMP_NUM_THREADS. A number that a user has put there says something else.
SHARE = "LOCKSTEP_CORES"

# Where users say how threads wait for each other, by the name of the OpenMP library: any, GNU's, LLVM's.
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")

# The least work for which a kernel is shared between threads, in multiplications: elements of a weight matrix x
# positions of a sample (tokens, patches of a picture) x samples of a micro-batch. One core takes about a millisecond.
LEAST_WORK = 2**24


@dataclass
class Threads:
    """This rank's CPU threads: their number, and why."""

    count: int
    reason: str
    share: int | None = None  # cores that large work may use; None: the number is settled

    @classmethod
    def choose(
        cls, asked: int | None, exact: bool, ranks: int, on_cpu: bool, usual: int, env: Mapping[str, str] = os.environ
    ) -> Self:
        """Return the number for a rank that shares this machine with `ranks` - 1 others, before its model is known.

        `asked` is the setting `threads`, and `usual` the number that torch has before the run.
        """
        if asked is not None:
            return cls(asked, "as asked")

        # The order in which a kernel adds depends on its threads: neither the number of ranks nor a variable of one
        # machine may change it.
        if exact:
            return cls(1, "exact=true")

        if NUMBER in env and env[NUMBER] != env.get(SHARE):
            return cls(usual, NUMBER)

        if usual not in _torchs_choices(env):
            return cls(usual, "set by the program")

        # Beside a GPU there is little to compute, and only if parameters or optimizers are kept in host memory.
        if not on_cpu:
            return cls(usual, "")

        return cls(1, "until the model is known", share=cores_for(ranks))

    def suit(self, matrices: list[int], positions: int | None) -> None:
        """Settle the number, given the elements of each weight matrix and the positions that a micro-batch has.

        Where these are not known (None), the work may be large.
        """
        if self.share is None:
            return

        # The average counts, since threads meet after each kernel, small or large.
        average = sum(matrices) // max(1, len(matrices))
        small = positions is not None and positions * average < LEAST_WORK and self.share > 1
        self.count = 1 if small else self.share
        cores = plural(self.share, "core")
        self.reason = f"small layers; threads={self.share} uses all its cores" if small else f"{cores} for this rank"
        self.share = None

    def __str__(self) -> str:
        return plural(self.count, "CPU thread") + (f" ({self.reason})" if self.reason else "")


def _torchs_choices(env: Mapping[str, str]) -> set[int]:
    """Return the numbers that torch may have chosen by itself; another one was set by the program.

    It takes OMP_NUM_THREADS, or all cores that the process may use. Its libraries differ in what they count: threads of
    the hardware or cores, and some do not look at the affinity.
    """
    given = env.get(NUMBER, "")
    return hardware_counts() | ({int(given)} if given.isdecimal() else set())


def cores_for(ranks: int) -> int:
    """Return the cores that each of `ranks` on this machine may use."""
    return max(1, available_cores() // ranks)


def share_cores(env: MutableMapping[str, str], ranks: int) -> None:
    """Write the share of each of `ranks` into the environment of their processes, unless the user has decided."""
    if NUMBER not in env or env[NUMBER] == env.get(SHARE):
        env[NUMBER] = env[SHARE] = str(cores_for(ranks))
    wait_asleep(env)


def wait_asleep(env: MutableMapping[str, str] = os.environ) -> None:
    """Let threads sleep while they wait for each other, unless the user has decided. Call it before torch is imported.

    By default they spin, which keeps the one that they wait for from running if others use the cores.
    """
    if not any(name in env for name in WAITING):
        env["OMP_WAIT_POLICY"] = "passive"
