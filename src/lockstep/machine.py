"""What this machine offers, found without importing torch, which takes seconds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def available_cores() -> int:
    """Those this process may use; not every system can tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus(env: Mapping[str, str] = os.environ) -> int:
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([part for part in chosen.split(",") if part.strip() and part.strip() != "-1"])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
