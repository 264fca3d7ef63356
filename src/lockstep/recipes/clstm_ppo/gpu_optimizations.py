"""GPUs for a training script: what there is, how many processes that makes, and starting them.

What such modules also switch on is the engine's business here: TF32 (`precision=tf32`), cuDNN's search for the fastest
algorithm (unless `deterministic=true`), mixed precision (`precision`), and memory that is freed (an empty cache would
only be filled again; `lockstep` says what to type when memory runs out).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

import lockstep
from lockstep.errors import UserError
from lockstep.recipes.clstm_ppo.cost import estimate_training_speedup, price_per_hour, table

__all__ = [
    "estimate_training_speedup",
    "get_gpu_info",
    "launch_distributed_training",
    "launched",
    "print_gpu_info",
    "print_training_speedup_estimates",
    "processes",
]


def launch_distributed_training(task: lockstep.Task, num_gpus: int = -1, **settings: Any) -> lockstep.RunResult:
    """Train on `num_gpus` (-1: all of them), one process each, and wait for the end. No address or port is set: the
    launcher finds a free one, and MASTER_ADDR and MASTER_PORT stay what they are."""
    count = processes(num_gpus)
    return lockstep.fit(task, nproc=count if count > 1 and not launched() else None, **settings)


def processes(num_gpus: int) -> int:
    """One for each GPU. Without a GPU as many on the CPU as asked for, and it is said. A launcher has decided already:
    torchrun says how many there are, on all machines."""
    found = torch.cuda.device_count()
    if num_gpus == 0 or num_gpus < -1:
        raise UserError(
            f"--num_gpus {num_gpus}", "no number of processes", "type --num_gpus -1 for all GPUs, or 1 to 8"
        )
    if launched():
        return int(os.environ["WORLD_SIZE"])
    if found and num_gpus > found:
        raise UserError(f"--num_gpus {num_gpus}", f"{found} GPUs here", f"type --num_gpus {found}, or -1 for all")
    if found:
        return found if num_gpus == -1 else num_gpus
    count = max(1, num_gpus)
    print(f"no GPU here: training in {count} process{'es' * (count > 1)} on the CPU", file=sys.stderr)
    return count


def launched() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def get_gpu_info() -> list[dict[str, Any]]:
    """Of every GPU that this process may use."""
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            {
                "index": index,
                "name": about.name,
                "capability": f"{about.major}.{about.minor}",
                "multiprocessors": about.multi_processor_count,
                "memory_gb": total / 2**30,
                "free_gb": free / 2**30,
                "bf16": torch.cuda.is_bf16_supported(),
                "tf32": about.major >= 8,
            }
        )
    return found


def print_gpu_info() -> None:
    found = get_gpu_info()
    if not found:
        print("no GPU here")
    for gpu in found:
        formats = ", ".join(name for name in ("bf16", "tf32") if gpu[name]) or "fp16"
        print(
            f"GPU {gpu['index']}: {gpu['name']}, capability {gpu['capability']}, {gpu['free_gb']:.1f} of "
            f"{gpu['memory_gb']:.1f} GB free, {formats}"
        )


def print_training_speedup_estimates(
    hours: float, price: float | None = None, rates: Mapping[int, float] | None = None
) -> None:
    """From the `hours` that one GPU takes; `rates` are what was measured, by number of GPUs. Without a `price` that of
    this machine's GPU is looked up."""
    if price is None and torch.cuda.is_available():
        price = price_per_hour(torch.cuda.get_device_name())
    print("\n".join(table(hours, price, rates)))
