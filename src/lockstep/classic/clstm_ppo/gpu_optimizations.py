"""GPUs for a training script: which there are, how many processes to start, and what time and money it takes.

The engine already does what such modules usually switch on: TF32 (`precision=tf32`), cuDNN's search for the fastest
algorithm (unless `deterministic=true`) and mixed precision (`precision`). Memory caches are not emptied: they would
only be filled again.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import spawn

import lockstep
from lockstep.classic.process_group import check_announced, current_world
from lockstep.errors import UserError
from lockstep.runtime import environments

# A rule of thumb, not a measurement: how much of the efficiency every doubling of the GPUs loses.
LOST_PER_DOUBLING = 0.05

SIZES = (1, 2, 4, 8)
PRICES = Path(__file__).with_name("gpu_prices.json")


# ---- processes -------------------------------------------------------------------------------------------


# What a process does: it is called with its rank, the number of processes, and further arguments.
TrainFunction = Callable[..., Any]


def launch_distributed_training(
    train_fn: TrainFunction | lockstep.Task | None = None, world_size: int = -1, *args: Any, **kwargs: Any
) -> Any:
    """Train on `world_size` GPUs (-1: all of them), one process each, and wait for the end.

    Without `train_fn` the trading agent is trained, as `train_distributed_clstm_ppo.py` does, and its metrics are
    returned; further arguments are passed to its trainer. A function is called in every process as `train_fn(rank,
    world_size, *args, **kwargs)`, with the environment that `init_process_group` needs. A Task is trained by
    `lockstep.fit`, with `kwargs` as settings. MASTER_ADDR and MASTER_PORT are used if they are set, and never changed.
    """
    if train_fn is None:
        # Imported late: the trainer imports this module.
        from lockstep.classic.clstm_ppo.trainer import DistributedCLSTMPPOTrainer

        return DistributedCLSTMPPOTrainer(world_size, *args, **kwargs).train()

    count = processes(world_size)
    if isinstance(train_fn, lockstep.Task):
        return lockstep.fit(train_fn, *args, nproc=processes_to_start(count), **kwargs)

    if launched() or count == 1:
        return train_fn(current_world().rank, count, *args, **kwargs)

    # Processes are spawned, so that none of them inherits a CUDA context.
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = os.environ.get("MASTER_PORT") or str(_free_port())
    try:
        spawn(_run_rank, (count, address, port, train_fn, args, kwargs), nprocs=count)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        # Errors of the function itself come as torch's ProcessRaisedException.
        raise UserError(
            f"{getattr(train_fn, '__qualname__', train_fn)} cannot be handed to other processes",
            str(error),
            "define the function at the top level of a file, and pass arguments that pickle takes",
        ) from error

    return None


def _run_rank(
    rank: int,
    count: int,
    address: str,
    port: str,
    train_fn: TrainFunction,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Be one of the processes that `launch_distributed_training` starts."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {name: str(value) for name, value in ranks.items()} | {"MASTER_ADDR": address, "MASTER_PORT": port}
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)

    train_fn(rank, count, *args, **kwargs)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def processes(num_gpus: int) -> int:
    """Return the number of processes that train: one for each GPU, or `num_gpus` on the CPU if there is no GPU.

    If a launcher such as torchrun has started this process, it has decided already, for all machines.
    """
    if num_gpus == 0 or num_gpus < -1:
        raise UserError(
            f"--num_gpus {num_gpus} is not a number of GPUs", "", "use --num_gpus -1 for all GPUs, or 1 to 8"
        )

    # All GPUs of all machines: only the launcher can count them.
    check_announced()
    if launched():
        return current_world().size

    available = torch.cuda.device_count()
    if available and num_gpus > available:
        raise UserError(
            f"--num_gpus {num_gpus} is more than the {available} GPUs here",
            "",
            f"use --num_gpus {available}, or -1 for all",
        )

    if available:
        return available if num_gpus == -1 else num_gpus

    count = max(1, num_gpus)
    print(f"no GPU here: training in {count} process{'es' * (count > 1)} on the CPU", file=sys.stderr)
    return count


def processes_to_start(count: int) -> int | None:
    """Return `count`, or None if this process trains itself: alone, or as one of a launcher's processes."""
    return count if count > 1 and not launched() else None


def launched() -> bool:
    """Return whether a launcher has started this process, and others beside it."""
    return environments.launched() or not current_world().alone


# ---- GPUs ------------------------------------------------------------------------------------------------


def get_gpu_info() -> list[dict[str, Any]]:
    """Return the properties of every GPU that this process may use."""
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)

        gpus.append(
            {
                "index": index,
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "memory_gb": total / 2**30,
                "free_gb": free / 2**30,
                "bf16": torch.cuda.is_bf16_supported(),
                "tf32": properties.major >= 8,
            }
        )

    return gpus


def print_gpu_info() -> None:
    gpus = get_gpu_info()
    if not gpus:
        print("no GPU here")

    for gpu in gpus:
        # Every GPU has fp16; we mention it only if there is nothing better.
        formats = ", ".join(name for name in ("bf16", "tf32") if gpu[name]) or "fp16"
        print(
            f"GPU {gpu['index']}: {gpu['name']}, capability {gpu['capability']}, {gpu['free_gb']:.1f} of "
            f"{gpu['memory_gb']:.1f} GB free, {formats}"
        )


# ---- time and cost ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speedup:
    """How much faster several GPUs are than one."""

    gpus: int
    efficiency: float

    @property
    def actual(self) -> float:
        return self.gpus * self.efficiency


def estimate_training_speedup(num_gpus: int = -1) -> Speedup:
    """Estimate the speed-up on `num_gpus` GPUs (-1: those here): every doubling loses 5 % of the efficiency."""
    if num_gpus == -1:
        num_gpus = max(1, torch.cuda.device_count())

    if num_gpus < 1:
        raise UserError(f"num_gpus={num_gpus} is not a number of GPUs", "", "use -1 for all GPUs here, or 1 or more")

    return Speedup(num_gpus, 1 - LOST_PER_DOUBLING * math.log2(num_gpus))


def price_per_hour(name: str) -> float | None:
    """Return the price of the GPU `name` from gpu_prices.json, or None if it is not there."""
    # Names are longer than kinds: "NVIDIA H100 80GB HBM3" is an H100.
    for kind, price in json.loads(PRICES.read_text())["per_hour"].items():
        if kind in name:
            return price

    return None


def price_here() -> float | None:
    """Return the price of this machine's GPU, if there is one and its price is known."""
    return price_per_hour(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def speedup_table(hours: float | None, price: float | None, rates: Mapping[int, float] | None = None) -> list[str]:
    """Return lines for 1, 2, 4 and 8 GPUs, from the `hours` on one GPU and its `price` for an hour.

    `rates` are measured rates by number of GPUs. Every other line is an estimate, and says so. Without `hours` there
    is no time and no cost.
    """
    rates = rates or {}
    lines = ["GPUs  speed-up  efficiency" + ("" if hours is None else "        time      cost")]
    for gpus in sorted({*SIZES, *rates}):
        # A measured speed-up needs the rate of one GPU to compare with.
        measured = gpus in rates and 1 in rates
        if measured:
            speedup = Speedup(gpus, rates[gpus] / (gpus * rates[1]))
        else:
            speedup = estimate_training_speedup(gpus)

        line = f"{gpus:4}  {speedup.actual:7.1f}x  {speedup.efficiency:10.0%}"

        if hours is not None:
            took = hours / speedup.actual
            cost = "" if price is None else f"${price * gpus * took:.2f}"
            line += f"  {duration(took):>10}  {cost:>8}"

        lines.append(f"{line}  {'measured' if measured else 'estimate'}")

    return lines


def print_training_speedup_estimates(
    hours: float | None = None, price: float | None = None, rates: Mapping[int, float] | None = None
) -> None:
    """Print the table of speed-ups; for a run that takes `hours` on one GPU also its time and cost.

    Without a `price`, the price of this machine's GPU is taken, if it is known.
    """
    print("\n".join(speedup_table(hours, price_here() if price is None else price, rates)))


def duration(hours: float) -> str:
    if hours * 60 < 0.1:
        return f"{hours * 3600:.1f} s"

    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.1f} min"


def measured_rate(run_dir: Path, epochs: int) -> float:
    """Return the environment steps per second of a finished run, in which every day is learnt from `epochs` times."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    # Everything warms up in the first interval.
    lines = lines[1:] or lines
    seconds = sum(line["weight"] / line["weight_per_s"] for line in lines)
    return sum(line["weight"] for line in lines) / seconds / epochs
