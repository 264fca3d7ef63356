"""The hardware of a measurement, and whether each rank had a device or cores of its own. Nothing here imports torch.

A scaling efficiency says something about the software only if ranks do not compete for cores, and if nothing else runs
meanwhile. This module finds out both, and puts into words why a result is not a fair test. A result is never left out
for that; it is only not judged.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import plural
from lockstep.runtime.host.resources import available_cores, visible_gpus

BUSY = 0.1  # share of our cores that other processes may use before ranks count as disturbed


@dataclass(frozen=True)
class Hardware:
    """One machine, as a report names it."""

    cpu: str
    cores: int  # that this process may use
    hardware_threads: int  # of the whole machine
    memory_gb: float
    gpus: list[str] = field(default_factory=list)
    system: str = ""
    load: float | None = None  # load average of the last minute, before the measurement

    def __str__(self) -> str:
        """Return `AMD EPYC, 8 cores, 64 GB; 2 x NVIDIA H100`."""
        text = f"{self.cpu}, {plural(self.cores, 'core')}, {self.memory_gb:.0f} GB"
        if not self.gpus:
            return text

        # Each kind of GPU once, with its number.
        gpus = ", ".join(f"{self.gpus.count(name)} x {name}" for name in dict.fromkeys(self.gpus))
        return f"{text}; {gpus}"


def this_machine() -> Hardware:
    """Look at the machine that measures."""
    # On Linux platform.processor() is empty, or only says which architecture it is.
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.exists() else None

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    return Hardware(
        cpu=model[1].strip() if model else platform.processor() or platform.machine(),
        cores=available_cores(),
        hardware_threads=os.cpu_count() or 1,
        memory_gb=round(memory, 1),
        gpus=_gpu_names(),
        system=f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        load=round(os.getloadavg()[0], 2),
    )


def _gpu_names() -> list[str]:
    """Return the names of the visible GPUs, as the driver's tool says them."""
    if not visible_gpus():
        return []

    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ["GPU"] * visible_gpus()

    # The tool lists all GPUs of the machine, also those that CUDA_VISIBLE_DEVICES hides.
    names = [line.strip() for line in listed.stdout.splitlines() if line.strip()]
    return (names or ["GPU"] * visible_gpus())[: visible_gpus()]


# ---- cores for ranks ----


def physical_cores(allowed: Sequence[int], root: Path = Path("/sys/devices/system/cpu")) -> list[list[int]]:
    """Group CPU numbers by the physical core that they belong to: hardware threads of one core share its units."""
    groups: dict[str, list[int]] = {}
    for cpu in sorted(allowed):
        # The list of a core's threads ("0,32") is the same text for each of them. Without it, a CPU is a core.
        siblings = root / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        core = siblings.read_text() if siblings.is_file() else str(cpu)
        groups.setdefault(core, []).append(cpu)

    return list(groups.values())


@dataclass(frozen=True)
class RankPlacement:
    """Which CPUs each rank may use, and whether ranks share anything."""

    cpus: list[list[int]]  # by rank
    shared: str = ""  # what ranks share, or may share; empty if each has its own
    gpus: int = 0  # that the ranks compute on
    cores: int = 0  # physical cores of a rank: fewer than its CPUs if those are hardware threads

    @property
    def own(self) -> bool:
        return not self.shared


def place(world: int, cores_per_rank: int, gpus: int | None = None) -> RankPlacement:
    """Give each rank its CPUs. Ranks share them if there are too few. `gpus` is 0 for ranks that compute on CPUs.

    A rank gets the same at every number of ranks, so that one rank and eight compare the same hardware: the hardware
    threads of one core belong to one rank, and those that it does not use stay idle.
    """
    # macOS does not tell which CPUs a process may use.
    if hasattr(os, "sched_getaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
    else:
        allowed = list(range(os.cpu_count() or 1))

    # Whole cores if there are enough, or else CPUs in turn, some of them more than once.
    groups = physical_cores(allowed)
    cpus = _whole_cores(groups, world, cores_per_rank) or _in_turn(groups, world, cores_per_rank)

    gpus = visible_gpus() if gpus is None else gpus

    # All ranks have as many as the first one.
    cores = sum(bool(set(group) & set(cpus[0])) for group in groups)
    return RankPlacement(cpus, _sharing(cpus, world, cores_per_rank, allowed, gpus), gpus, cores)


def _whole_cores(groups: list[list[int]], world: int, cores_per_rank: int) -> list[list[int]] | None:
    """Return the CPUs of each rank, on cores of its own, or None if there are too few cores."""
    # Cores are handed out in order, and never to two ranks.
    free = iter(groups)
    cpus: list[list[int]] = []
    for _ in range(world):
        mine: list[int] = []
        while len(mine) < cores_per_rank:
            group = next(free, None)
            if group is None:
                return None

            mine += group

        # A thread that the rank does not use stays idle.
        cpus.append(mine[:cores_per_rank])

    return cpus


def _in_turn(groups: list[list[int]], world: int, cores_per_rank: int) -> list[list[int]]:
    """Return the CPUs of each rank, one after the other, and from the beginning again when all are given."""
    ordered = [cpu for group in groups for cpu in group]
    return [
        [ordered[(rank * cores_per_rank + index) % len(ordered)] for index in range(cores_per_rank)]
        for rank in range(world)
    ]


def _sharing(cpus: list[list[int]], world: int, cores_per_rank: int, allowed: list[int], gpus: int) -> str:
    """Return what ranks share, in words, or nothing if each has its own."""
    # With GPUs the ranks compute there, and share them if there are too few.
    if gpus:
        return f"{world} ranks share {plural(gpus, 'GPU')}" if world > gpus else ""

    if not hasattr(os, "sched_setaffinity"):
        return "this system cannot give ranks cores of their own"
    if world * cores_per_rank > available_cores():
        return f"{world} ranks of {plural(cores_per_rank, 'core')} share {plural(available_cores(), 'core')}"

    # Hardware threads of one core that belong to different ranks.
    core_of = {cpu: number for number, group in enumerate(physical_cores(allowed)) for cpu in group}
    users: dict[int, set[int]] = {}
    for rank, mine in enumerate(cpus):
        for cpu in mine:
            users.setdefault(core_of[cpu], set()).add(rank)

    if any(len(ranks) > 1 for ranks in users.values()):
        return "ranks share physical cores, as hardware threads"
    return ""


# ---- other processes ----


class OtherLoad:
    """Measures how many cores other processes used while ours were measured."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._busy = _busy_seconds()

    def cores(self, own_cpu_seconds: float) -> float | None:
        """Return the cores that others used on average, or None where the system does not say."""
        busy = _busy_seconds()
        if self._busy is None or busy is None:
            return None

        # The two clocks have different resolutions, so a short time may give less than nothing.
        seconds = max(1e-6, time.monotonic() - self._since)
        return max(0.0, (busy - self._busy - own_cpu_seconds) / seconds)


def _busy_seconds() -> float | None:
    """Return the seconds that the CPUs which we may use have been busy, or None where the system does not say."""
    stat = Path("/proc/stat")
    if not stat.exists() or not hasattr(os, "sched_getaffinity"):
        return None

    # With a quota of CPU time, other processes on these CPUs take nothing from us.
    ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    if len(ours) != available_cores():
        return None

    # A line for each CPU: its name, and clock ticks by kind of work. Idle time and waiting for disks do not count.
    total = 0
    for name, *fields in map(str.split, stat.read_text().splitlines()):
        if name in ours:
            user, nice, system, _, _, irq, soft_irq, steal, *_ = map(int, fields)
            total += user + nice + system + irq + soft_irq + steal

    return total / os.sysconf("SC_CLK_TCK")


def disturbance(busy: float | None) -> str:
    """Return why a measurement during which others used `busy` cores cannot be judged, or nothing."""
    if busy is None:
        return "how busy other processes kept the cores is not known on this system"
    if busy > BUSY * available_cores():
        return f"other processes used {busy:.2f} cores meanwhile"
    return ""


def describe(placement: RankPlacement, cores_per_rank: int) -> str:
    """Return one sentence about what each rank had."""
    if placement.shared:
        return placement.shared
    if placement.gpus:
        return "each rank has a GPU of its own"
    if placement.cores < cores_per_rank:
        return f"each rank has {cores_per_rank} hardware threads of {plural(placement.cores, 'core')} of its own"
    return f"each rank has {plural(cores_per_rank, 'core')} of its own"


def as_record(hardware: Hardware) -> dict[str, Any]:
    return {**vars(hardware), "text": str(hardware)}
