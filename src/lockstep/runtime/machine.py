"""The resources of this machine, found without importing torch, which takes seconds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def available_cores() -> int:
    """Return the number of cores that this process may use; where the system cannot tell, of all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> int:
    """Return the bytes of host memory that are still free; where the system does not say (macOS), all there are."""
    # Linux counts what it could reclaim from caches, too.
    known = Path("/proc/meminfo")
    if known.exists():
        for line in known.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024

    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def visible_gpus(env: Mapping[str, str] = os.environ) -> int:
    """Return the number of NVIDIA GPUs that CUDA_VISIBLE_DEVICES allows, or that the driver lists."""
    # As CUDA reads it: an empty list, or -1, hides all GPUs.
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([part for part in chosen.split(",") if part.strip() and part.strip() != "-1"])

    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
