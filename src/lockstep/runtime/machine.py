"""The resources of this machine, found without importing torch, which takes seconds."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path


def available_cores() -> int:
    """Return the number of cores that this process may use, or of all cores where the system does not say (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))

    return os.cpu_count() or 1


def available_memory() -> int:
    """Return the bytes of host memory that are still free, or all of them where the system does not say (macOS)."""
    # MemAvailable, in KiB, includes what Linux could reclaim from caches.
    meminfo = Path("/proc/meminfo")
    if meminfo.exists() and (free := re.search(r"^MemAvailable:\s*(\d+)", meminfo.read_text(), re.MULTILINE)):
        return int(free[1]) * 1024

    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def visible_gpus(env: Mapping[str, str] = os.environ) -> int:
    """Return the number of NVIDIA GPUs that CUDA_VISIBLE_DEVICES allows, or that the driver lists."""
    # As CUDA reads it: an empty list, or -1, hides all GPUs.
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return sum(device.strip() not in ("", "-1") for device in visible.split(","))

    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
