"""What this machine offers, found without importing torch, which takes seconds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def available_cores() -> int:
    """Those this process may use; not every system can tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int:
    """Bytes of the host's that could still be taken; where the system does not say (macOS), all there are."""
    known = Path("/proc/meminfo")
    for line in known.read_text().splitlines() if known.exists() else []:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def visible_gpus(env: Mapping[str, str] = os.environ) -> int:
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([part for part in chosen.split(",") if part.strip() and part.strip() != "-1"])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
