"""Physical cores for ranks: which CPUs share one, and which rank gets which. Nothing here imports torch.

A CPU of the system is a hardware thread, and often two of them share the units of one core. A rank must have the same
hardware at every number of ranks: whole cores, with all of their hardware threads. Otherwise one rank has two cores for
its two threads, and each of eight has two halves of one, and what that costs looks like a loss of scaling.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import plural
from lockstep.runtime.host.resources import available_cores, visible_gpus

# How the CPUs of one core are found (--siblings): the system says it, or it is measured, or the user says it.
SYSTEM, MEASURE, ADJACENT, HALVES, NONE = SIBLINGS = ("system", "measure", "adjacent", "halves", "none")

SLOWED = 0.75  # a CPU below this share of its rate alone shares its core. Lower clock rates of a busy machine cost less


@dataclass(frozen=True)
class Cores:
    """The physical cores that this process may use."""

    cpus: list[list[int]]  # the hardware threads of each core, as many for each
    source: str  # who says so
    doubt: str = ""  # why it may be wrong; empty if it is known

    @property
    def usable(self) -> int:
        """How many cores the ranks can keep busy: all of them, or what the quota of a container allows."""
        return max(1, min(len(self.cpus), available_cores()))

    @property
    def threads(self) -> int:
        """The hardware threads of a core."""
        return len(self.cpus[0])

    def __str__(self) -> str:
        """Return `8 cores with 2 hardware threads each (CPUs 0+8, 1+9, 2+10, ...), as measured`."""
        shown = ["+".join(map(str, core)) for core in self.cpus[:3]]
        if len(self.cpus) > len(shown):
            shown.append("...")

        threads = f" with {self.threads} hardware threads each" if self.threads > 1 else ""
        return f"{plural(len(self.cpus), 'core')}{threads} (CPUs {', '.join(shown)}), {self.source}"


def allowed_cpus() -> list[int]:
    """Return the CPUs that this process may use. macOS does not tell them."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def find_cores(
    siblings: str = SYSTEM,
    allowed: Sequence[int] | None = None,
    root: Path = Path("/sys/devices/system/cpu"),
    cpuinfo: Path = Path("/proc/cpuinfo"),
) -> Cores:
    """Return the cores, by what the system says or by how the user says that CPUs are numbered."""
    allowed = allowed_cpus() if allowed is None else allowed
    if siblings in (ADJACENT, HALVES, NONE):
        return Cores(alike(paired(allowed, siblings, os.cpu_count() or 1)), f"--siblings {siblings}")

    # The list of a core's threads ("0,32") is the same text for each of them. Without it, a CPU counts as a core.
    files = {cpu: root / f"cpu{cpu}" / "topology" / "thread_siblings_list" for cpu in allowed}
    lists = {cpu: file.read_text() for cpu, file in files.items() if file.is_file()}
    cores = grouped({cpu: lists.get(cpu, str(cpu)) for cpu in allowed})

    # A virtual machine may present the hardware threads of a core as cores. One that presents threads has no secret.
    doubt = ""
    virtual = cpuinfo.is_file() and "hypervisor" in cpuinfo.read_text()
    if len(cores) == len(allowed) > 1 and (virtual or len(lists) < len(allowed)):
        doubt = "this system does not say which CPUs share a core; add --siblings measure"

    return Cores(alike(cores), "as the system says", doubt)


def paired(allowed: Sequence[int], siblings: str, total: int) -> list[list[int]]:
    """Group CPUs of a machine with `total` of them: CPU 2i with 2i + 1 (adjacent), i with i + total / 2 (halves)."""
    half = (total + 1) // 2
    core_of = {ADJACENT: lambda cpu: cpu // 2, HALVES: lambda cpu: cpu % half, NONE: lambda cpu: cpu}[siblings]
    return grouped({cpu: core_of(cpu) for cpu in allowed})


def grouped(core_of: Mapping[int, object]) -> list[list[int]]:
    """Group CPUs by their core, in the order of the first CPU of each."""
    cores: dict[object, list[int]] = {}
    for cpu in sorted(core_of):
        cores.setdefault(core_of[cpu], []).append(cpu)

    return list(cores.values())


def alike(cores: list[list[int]]) -> list[list[int]]:
    """Leave out hardware threads that not every core has, because this process may not use their siblings."""
    threads = min(map(len, cores))
    return [core[:threads] for core in cores]


# ---- cores that are measured ----


def probe_sets(cpus: Sequence[int], total: int) -> dict[str, list[int]]:
    """Return CPUs to keep busy at once, for each way in which a machine with `total` CPUs may number them.

    If that way is right, each of these CPUs shares its core with another one of them. If the other way is right, none
    does. A way of which `cpus` has no such pair has no set.
    """
    # On two CPUs both ways are the same.
    if total == 2:
        return {ADJACENT: list(cpus)} if len(cpus) == 2 else {}

    sets: dict[str, list[int]] = {}
    for way, other in ((ADJACENT, HALVES), (HALVES, ADJACENT)):
        busy: list[int] = []
        for core in paired(cpus, way, total):
            apart = paired([*busy, *core], other, total)
            if len(core) == 2 and len(apart) == len(busy) + 2:
                busy += core

        if busy:
            sets[way] = sorted(busy)

    return sets


def judge_probe(cpus: Sequence[int], rates: Mapping[str, float], total: int) -> Cores:
    """Decide which CPUs share a core, by the rates of a CPU in each of the `probe_sets` and with "all" of them busy.

    A rate is in units of what a CPU computes alone. It is 1 for a way that has no set.
    """
    pairs = {way: rates.get(way, 1.0) for way in (ADJACENT, HALVES)}
    slow, fast = sorted(pairs, key=lambda way: pairs[way])

    # In both sets equally many CPUs are busy: clock rates and caches are the same, and only the pairs differ.
    if pairs[slow] < SLOWED * pairs[fast]:
        return Cores(alike(paired(cpus, slow, total)), f"as measured ({slow})")

    if pairs[slow] < SLOWED:
        doubt = "all CPUs slow each other down, so that which of them share a core could not be measured"
        return Cores([[cpu] for cpu in cpus], "not measured", doubt)

    # The host may move its virtual CPUs from core to core: then no more of them can be used than it has cores.
    if rates["all"] < SLOWED * pairs[fast]:
        half = [[cpu] for cpu in cpus[: len(cpus) // 2]]
        return Cores(half, "as measured; the other CPUs share them in no fixed pairs, and stay idle")

    return Cores([[cpu] for cpu in cpus], f"as measured ({NONE} shared)")


# ---- ranks ----


@dataclass(frozen=True)
class RankPlacement:
    """Which CPUs each rank may use, and whether ranks share anything."""

    cpus: list[list[int]]  # the CPUs of each rank
    shared: str = ""  # the hardware that ranks share; empty if each has its own
    gpus: int = 0  # that the ranks compute on
    cores: int = 1  # physical cores of a rank; it computes with as many threads
    doubt: str = ""  # why cores may be shared after all
    source: str = ""  # who says which CPUs are one core

    def __str__(self) -> str:
        """Return one sentence about the hardware of each rank."""
        if self.shared:
            return self.shared
        if self.gpus:
            return "each rank has a GPU of its own"

        # Other work of a rank, such as communication, may run on the hardware threads that do not compute.
        text = f"each rank has {plural(self.cores, 'core')} of its own"
        if (threads := len(self.cpus[0])) > self.cores:
            text += f" ({threads} hardware threads, {self.source}) and computes with {plural(self.cores, 'thread')}"
        return text


def place(world: int, cores_per_rank: int, cores: Cores, gpus: int | None = None) -> RankPlacement:
    """Give each rank whole cores, as many at every number of ranks, in turn if there are too few.

    `gpus` is 0 for ranks that compute on CPUs.
    """
    gpus = visible_gpus() if gpus is None else gpus
    cpus = []
    for rank in range(world):
        numbers = range(rank * cores_per_rank, (rank + 1) * cores_per_rank)
        mine = {cpu for number in numbers for cpu in cores.cpus[number % len(cores.cpus)]}
        cpus.append(sorted(mine))

    shared = _sharing(world, cores_per_rank, cores.usable, gpus)
    return RankPlacement(cpus, shared, gpus, cores_per_rank, "" if gpus else cores.doubt, cores.source)


def _sharing(world: int, cores_per_rank: int, usable: int, gpus: int) -> str:
    """Return the hardware that ranks share, in words, or nothing if each has its own."""
    # With GPUs the ranks compute there, and share them if there are too few.
    if gpus:
        return f"{world} ranks share {plural(gpus, 'GPU')}" if world > gpus else ""

    if not hasattr(os, "sched_setaffinity"):
        return "this system cannot give ranks cores of their own"
    if world * cores_per_rank > usable:
        return f"{world} ranks of {plural(cores_per_rank, 'core')} share {plural(usable, 'core')}"
    return ""
