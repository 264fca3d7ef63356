"""The hardware of a measurement, and the share of it that other processes took meanwhile. Nothing here imports torch.

A scaling efficiency says something about the software only if ranks do not compete for cores (`cores.py`), and if
nothing else runs meanwhile. A result of which that is not known is never left out; it is only not judged.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
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
    cpus: int  # that this process may use: cores, or hardware threads of cores
    hardware_threads: int  # the threads of the whole machine
    memory_gb: float
    gpus: list[str] = field(default_factory=list)
    system: str = ""
    load: float | None = None  # load average of the last minute, before the measurement

    def __str__(self) -> str:
        """Return `AMD EPYC, 8 CPUs, 64 GB; 2 x NVIDIA H100`."""
        text = f"{self.cpu}, {plural(self.cpus, 'CPU')}, {self.memory_gb:.0f} GB"
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
        cpus=available_cores(),
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

    # The tool lists all GPUs of the machine, also GPUs that CUDA_VISIBLE_DEVICES hides.
    names = [line.strip() for line in listed.stdout.splitlines() if line.strip()]
    return (names or ["GPU"] * visible_gpus())[: visible_gpus()]


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


def as_record(hardware: Hardware) -> dict[str, Any]:
    return {**vars(hardware), "text": str(hardware)}
