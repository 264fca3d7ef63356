"""The cores, the memory and the GPUs of this machine, found without importing torch, which takes seconds."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path


def available_cores() -> int:
    """Return the number of cores that this process may use: by its affinity, and by the quota of its container."""
    # macOS has no such function.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def hardware_counts(cpus: Path = Path("/sys/devices/system/cpu")) -> set[int]:
    """Return the numbers of hardware threads and cores: of the whole machine, and within the affinity."""
    everything = set(range(os.cpu_count() or 1))
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else everything

    counts = set()
    for group in (everything, allowed):
        files = [cpus / f"cpu{number}" / "topology" / "thread_siblings_list" for number in group]
        cores = {file.read_text() for file in files if file.is_file()}
        counts |= {len(group), len(cores) or len(group)}

    return counts


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), of_process: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return how many cores the control groups of this process allow it (cgroup v2), or None if they set no limit."""
    # The line is "0::/a/b". Every group on that path may have a limit, and the lowest limit applies. In a container the
    # path is often the host's, and only the top of the tree is visible.
    line = re.search(r"^0::/(.*)$", of_process.read_text(), re.MULTILINE) if of_process.exists() else None
    folder = root / line[1] if line else root

    quotas = []
    for group in (folder, *folder.parents):
        file = group / "cpu.max"
        if group.is_relative_to(root) and file.is_file() and (limit := re.match(r"(\d+) (\d+)", file.read_text())):
            quotas.append(int(limit[1]) / int(limit[2]))

    return min(quotas, default=None)


def available_memory() -> int:
    """Return the bytes of host memory that are free, with what the system could reclaim from caches."""
    import psutil

    return psutil.virtual_memory().available


def visible_gpus(env: Mapping[str, str] = os.environ) -> int:
    """Return the number of NVIDIA GPUs that CUDA_VISIBLE_DEVICES allows, or that the driver lists."""
    # As CUDA reads it: an empty list, or -1, hides all GPUs.
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return sum(device.strip() not in ("", "-1") for device in visible.split(","))

    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
