"""What `check_gpu_setup.py` runs: can this machine train what the script trains, how long would it take, what to do.

Each check is a function that returns findings: what was found, whether it is a problem, and what to do about it. None
of them needs a GPU to answer that there is none.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import lockstep
from lockstep.classic.clstm_ppo.gpu_optimizations import (
    duration,
    get_gpu_info,
    measured_rate,
    price_here,
    speedup_table,
)
from lockstep.classic.clstm_ppo.trainer import DistributedCLSTMPPOTrainer
from lockstep.errors import UserError
from lockstep.precision import PRECISIONS
from lockstep.recipes.clstm_ppo import ClstmPpo
from lockstep.runtime.host.resources import available_cores

SCRIPT = "train_distributed_clstm_ppo.py"
SMOKE_STEPS = 4
MEASURED_UPDATES = 3


@dataclass(frozen=True)
class SetupFinding:
    """The result of one check; `advice` says what to do about it."""

    name: str
    state: Literal["ok", "note", "fail"]
    text: str
    advice: str = ""


def cuda() -> SetupFinding:
    """Return whether torch can use a GPU here, and why not."""
    if torch.cuda.is_available():
        return SetupFinding("CUDA", "ok", f"{torch.cuda.device_count()} GPUs, CUDA {torch.version.cuda}")

    # A torch that was built for GPUs, on a machine where none is visible.
    if torch.version.cuda or torch.version.hip:
        text = f"no GPU is visible, though torch {torch.__version__} could use one"
        return SetupFinding("CUDA", "note", text, "look at nvidia-smi and CUDA_VISIBLE_DEVICES")

    advice = "install a torch with CUDA to train on GPUs; the preset cpu needs none"
    return SetupFinding("CUDA", "note", f"torch {torch.__version__} is for CPUs only", advice)


def nccl() -> SetupFinding:
    """Return whether GPUs can exchange gradients."""
    if not torch.cuda.is_available():
        return SetupFinding("NCCL", "note", "not needed: processes on CPUs talk over gloo")

    if torch.distributed.is_nccl_available():
        version = ".".join(str(part) for part in torch.cuda.nccl.version())
        return SetupFinding("NCCL", "ok", f"version {version}")

    return SetupFinding("NCCL", "fail", "this torch has none", "install a torch with NCCL, or train on one GPU")


def gpu_memory() -> SetupFinding:
    """Return how much of each GPU's memory is free."""
    gpus = get_gpu_info()
    if not gpus:
        return SetupFinding("GPU memory", "note", "no GPU")

    text = ", ".join(f"GPU {gpu['index']} {gpu['free_gb']:.1f} of {gpu['memory_gb']:.1f} GB free" for gpu in gpus)

    # Below 80 % of the memory something else must be running there.
    for gpu in gpus:
        if gpu["free_gb"] < 0.8 * gpu["memory_gb"]:
            return SetupFinding("GPU memory", "note", text, f"another process uses GPU {gpu['index']}: see nvidia-smi")

    return SetupFinding("GPU memory", "ok", text)


def model_memory(trainer: DistributedCLSTMPPOTrainer) -> SetupFinding:
    """Compare what a process of the script needs with the free memory of the fullest GPU."""
    batch_size = trainer.batch_size
    needed = bytes_needed(trainer.task, batch_size, trainer.micro_batch) / 2**30
    size = f"{needed:.1f} GB" if needed >= 0.1 else f"{needed * 1024:.1f} MB"
    text = f"about {size} a process, estimated: preset {trainer.preset} with {batch_size} environments a step"

    free = min((gpu["free_gb"] for gpu in get_gpu_info()), default=None)
    if free is None or needed <= free:
        return SetupFinding("model memory", "ok", text)

    # What every environment adds is in proportion; the weights stay.
    fixed = bytes_needed(trainer.task, 0, 0) / 2**30

    parts = batch_size // trainer.micro_batch
    fits = int(batch_size * (free - fixed) / (needed - fixed)) // parts * parts

    # A multiple of the parts, because each of them has as many environments.
    advice = f"use --batch_size {fits}, or a smaller --preset" if fits > 0 else "use a smaller --preset"
    return SetupFinding("model memory", "fail", text, advice)


def bytes_needed(task: ClstmPpo, batch_size: int, micro_batch: int) -> float:
    """Estimate the bytes of weights, gradients and Adam's state, of a rollout, and of what a backward pass keeps."""
    shape, options = task.shape, task.source.options
    # Four float32 numbers for each parameter.
    state = 16 * sum(p.numel() for p in task.model().parameters())
    window = 4 * shape.window * shape.features

    # The days of a rollout, and the tables of two episodes for each environment.
    environments = batch_size * options.minibatches
    rollout = 2 * environments * options.rollout * window
    tables = environments * 2 * (shape.window + shape.episode) * shape.assets * 12

    # The backward pass of a micro-batch needs the four gates, the cell and the output of every LSTM.
    reader = shape.window * shape.hidden * shape.cascade * (shape.variant == "clstm")
    activations = micro_batch * options.rollout * (2 * window + 4 * 6 * (reader + shape.memory))
    return state + rollout + tables + activations


def distributed() -> SetupFinding:
    """Let two processes train the smallest agent for a few steps: they start, meet, all-reduce and agree."""
    try:
        trainer = DistributedCLSTMPPOTrainer(1, 1, 8, preset="tiny")
        trainer.initialize()
        _short_run(trainer, SMOKE_STEPS, nproc=2)
    except Exception as error:  # any failure at all is what this check is to find
        return SetupFinding("distributed training", "fail", f"two processes: {error}", "look at the message above")

    return SetupFinding("distributed training", "ok", f"two processes trained {SMOKE_STEPS} steps together")


def time_estimate(trainer: DistributedCLSTMPPOTrainer, price: float | None) -> SetupFinding:
    """Measure a few updates of what the script trains, and estimate the time of all its episodes from them."""
    # On one process; other numbers of GPUs are estimated from it.
    steps = MEASURED_UPDATES * trainer.task.source.options.steps
    rate = _short_run(trainer, steps)

    # Steps per second, so hours are steps / rate / 3600.
    hours = trainer.num_episodes * trainer.task.shape.episode / rate / 3600
    text = f"{rate:,.0f} environment steps/s measured here: {trainer.num_episodes} episodes take {duration(hours)}"

    lines = []
    if torch.cuda.is_available():
        lines = speedup_table(hours, price_here() if price is None else price, {1: rate})

    return SetupFinding("training time", "ok", "\n    ".join([text, *lines]))


def recommendations(findings: Iterable[SetupFinding], typed: Mapping[str, Any]) -> SetupFinding:
    """Recommend the script, with what was typed here and a process for each GPU, or for each core if there is none."""
    gpus = get_gpu_info()
    advice = [finding.advice for finding in findings if finding.advice]
    words = ["python", SCRIPT, "--num_gpus", str(len(gpus) or min(2, available_cores()))]

    # The command, with the options that this check was given.
    for name, value in typed.items():
        words += [f"--{name}", str(value)] if value is not None else []

    advice.append(shlex.join(words) + ("" if gpus else "  (processes on the CPU)"))
    if len({gpu["name"] for gpu in gpus}) > 1:
        advice.append("the GPUs differ: equal shares wait for the slowest one")

    return SetupFinding("recommendations", "ok", "\n    ".join(advice))


def _short_run(trainer: DistributedCLSTMPPOTrainer, steps: int, nproc: int | None = None) -> float:
    """Train for a moment in a temporary folder. Return environment steps per second after the first update."""
    options = trainer.task.source.options
    # Goals belong to a whole run.
    values = {key: value for key, value in trainer.values.items() if key != "goals"}
    values |= {
        "steps": steps,
        "log": {"progress": "off", "every": options.steps},
        "evaluate": {"every": None},
    }

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        lockstep.fit(trainer.task, values | {"run_dir": str(run_dir)}, nproc=nproc)
        return measured_rate(run_dir, options.epochs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print all checks. Return 0 if this machine can train, on GPUs or without."""
    # The names are those of the training script.
    parser = argparse.ArgumentParser(description=f"Check this machine for training the trading agent with {SCRIPT}.")
    parser.add_argument("--num_episodes", type=int, help="to estimate the time for (default: the script's, 5000)")
    parser.add_argument("--preset", choices=list(ClstmPpo.presets), help="size of the agent (default: by the machine)")
    parser.add_argument("--batch_size", type=int, help="environments per GPU and step (default: the script's, 128)")
    parser.add_argument("--precision", choices=list(PRECISIONS), help="number format (default: the preset's)")
    parser.add_argument("--price_per_hour", type=float, help="of one GPU, in dollars (default: by its name)")
    options = parser.parse_args(arguments)

    # The same arguments as the script: what is estimated is what it trains.
    typed = {name: getattr(options, name) for name in ("num_episodes", "batch_size", "preset", "precision")}

    try:
        trainer = DistributedCLSTMPPOTrainer(1, **{name: value for name, value in typed.items() if value is not None})
        trainer.initialize()
    except UserError as error:
        print(f"check_gpu_setup: {error}", file=sys.stderr)
        return 2

    findings: list[SetupFinding] = []
    checks: list[Callable[[], SetupFinding]] = [
        cuda,
        nccl,
        gpu_memory,
        lambda: model_memory(trainer),
        distributed,
        lambda: time_estimate(trainer, options.price_per_hour),
        lambda: recommendations(findings, typed),
    ]

    # Each finding is printed at once: some checks take a while.
    for check in checks:
        finding = check()
        findings.append(finding)
        print(f"[{finding.state:>4}] {finding.name}: {finding.text}", flush=True)

        if finding.advice:
            print(f"    {finding.advice}", flush=True)

    return int(any(finding.state == "fail" for finding in findings))
