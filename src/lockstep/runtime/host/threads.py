"""How many CPU threads a rank computes with.

Threads wait for each other after every kernel. If the cores are shared, one of them is often descheduled and all wait
for it: a small model was 30 times slower with two threads than with one. So the number is chosen by the size of the
work, and is 1 for a small model with small samples. It is not measured, because it decides the order in which kernels
add, and a repeated run must choose the same number.

Nothing here imports torch: OpenMP's environment variables must be set before torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Self

from lockstep.errors import plural
from lockstep.runtime.host.resources import available_cores, hardware_counts

OMP_THREADS_VAR = "OMP_NUM_THREADS"

# Environment variable: the value that the launcher has set for OMP_NUM_THREADS. If OMP_NUM_THREADS differs from it, the
# user has set OMP_NUM_THREADS.
CORES_VAR = "LOCKSTEP_CORES"

# The variables that set how threads wait for each other: of all OpenMP libraries, of GNU's, of LLVM's.
WAIT_VARS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")

# The least work for which a kernel uses several threads, in multiplications: elements of a weight matrix x positions of
# a sample (tokens, patches of a picture) x samples of a micro-batch. One core takes about a millisecond for it.
LEAST_WORK = 2**24


@dataclass
class Threads:
    """The number of this rank's CPU threads, and the reason for it.

    It is decided before torch is imported, as far as the environment can say it, and again when the model is known.
    """

    count: int
    reason: str
    share: int | None = None  # cores that large work may use; None if `count` is final

    @classmethod
    def choose(
        cls, asked: int | None, exact: bool, ranks: int, on_cpu: bool, usual: int, env: Mapping[str, str] = os.environ
    ) -> Self:
        """Choose the number for each of `ranks` on this machine, before the model is known.

        `asked` is the setting `threads`, and `usual` the number that torch has before the run.
        """
        if asked is not None:
            return cls(asked, "as asked")

        # The order in which a kernel adds depends on its threads: neither the number of ranks nor a variable of one
        # machine may change it.
        if exact:
            return cls(1, "exact=true")

        if OMP_THREADS_VAR in env and env[OMP_THREADS_VAR] != env.get(CORES_VAR):
            return cls(usual, OMP_THREADS_VAR)

        if usual not in _torchs_choices(env):
            return cls(usual, "set by the program")

        # With a GPU there is little to compute on the CPU: only parameters or optimizers in host memory.
        if not on_cpu:
            return cls(usual, "")

        return cls(1, "until the model is known", share=cores_for(ranks))

    def suit(self, matrices: list[int], positions: int | None) -> None:
        """Make the number final, given the elements of each weight matrix and the positions of a micro-batch.

        If the positions are not known (None), the work counts as large.
        """
        if self.share is None:
            return

        # The average matrix decides, because threads wait for each other after each kernel, small or large.
        average = sum(matrices) // max(1, len(matrices))
        small = positions is not None and positions * average < LEAST_WORK and self.share > 1
        self.count = 1 if small else self.share
        cores = plural(self.share, "core")
        self.reason = f"small layers; threads={self.share} uses all its cores" if small else f"{cores} for this rank"
        self.share = None

    def __str__(self) -> str:
        return plural(self.count, "CPU thread") + (f" ({self.reason})" if self.reason else "")


def _torchs_choices(env: Mapping[str, str]) -> set[int]:
    """Return the numbers that torch may have chosen by itself; any other number was set by the program.

    Torch takes OMP_NUM_THREADS, or all cores that the process may use. Its libraries count differently: hardware
    threads or cores, with or without the affinity.
    """
    given = env.get(OMP_THREADS_VAR, "")
    return hardware_counts() | ({int(given)} if given.isdecimal() else set())


def cores_for(ranks: int) -> int:
    """Return the cores that each of `ranks` on this machine may use."""
    return max(1, available_cores() // ranks)


def share_cores(env: MutableMapping[str, str], ranks: int) -> None:
    """Set OMP_NUM_THREADS for each of `ranks` processes in their environment, unless the user has set it."""
    if OMP_THREADS_VAR not in env or env[OMP_THREADS_VAR] == env.get(CORES_VAR):
        env[OMP_THREADS_VAR] = env[CORES_VAR] = str(cores_for(ranks))

    wait_asleep(env)


def wait_asleep(env: MutableMapping[str, str] = os.environ) -> None:
    """Let threads sleep while they wait for each other, unless the user has set this. Call it before torch is imported.

    By default they spin, which may keep the thread that they wait for from running.
    """
    if not any(name in env for name in WAIT_VARS):
        env["OMP_WAIT_POLICY"] = "passive"
