"""Is this machine ready to train the agent? What `check_gpu_setup.py` prints: seven checks, each with what to do."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import lockstep
from lockstep.recipes.clstm_ppo.cost import duration, measured_rate, price_per_hour, table
from lockstep.recipes.clstm_ppo.gpu_optimizations import get_gpu_info
from lockstep.recipes.clstm_ppo.task import ClstmPpo

SMOKE_STEPS, MEASURED_UPDATES = 4, 3


@dataclass(frozen=True)
class Finding:
    name: str
    state: Literal["ok", "note", "fail"]
    text: str
    advice: str = ""  # what to do about it


def cuda() -> Finding:
    if torch.cuda.is_available():
        return Finding("CUDA", "ok", f"{torch.cuda.device_count()} GPUs, CUDA {torch.version.cuda}")
    built = torch.version.cuda or torch.version.hip
    if built:
        advice = "look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        return Finding("CUDA", "note", f"no GPU is visible, though torch {torch.__version__} could use one", advice)
    advice = "install a torch with CUDA to train on GPUs; the preset cpu needs none"
    return Finding("CUDA", "note", f"torch {torch.__version__} is for CPUs only", advice)


def nccl() -> Finding:
    if not torch.cuda.is_available():
        return Finding("NCCL", "note", "not needed: processes on CPUs talk over gloo")
    if torch.distributed.is_nccl_available():
        version = ".".join(str(part) for part in torch.cuda.nccl.version())
        return Finding("NCCL", "ok", f"version {version}")
    return Finding("NCCL", "fail", "this torch has none", "install a torch with NCCL, or train on one GPU")


def memory() -> Finding:
    gpus = get_gpu_info()
    if not gpus:
        return Finding("GPU memory", "note", "no GPU")
    told = ", ".join(f"GPU {gpu['index']} {gpu['free_gb']:.1f} of {gpu['memory_gb']:.1f} GB free" for gpu in gpus)
    taken = [gpu for gpu in gpus if gpu["free_gb"] < 0.8 * gpu["memory_gb"]]
    if taken:
        return Finding("GPU memory", "note", told, f"somebody else uses GPU {taken[0]['index']}: see nvidia-smi")
    return Finding("GPU memory", "ok", told)


def need(preset: str, batch_size: int) -> Finding:
    task = ClstmPpo(**ClstmPpo.presets[preset]["task"])
    gigabytes, always = (bytes_needed(task, size) / 2**30 for size in (batch_size, 0))
    size = f"{gigabytes:.1f} GB" if gigabytes >= 0.1 else f"{gigabytes * 1024:.1f} MB"
    text = f"about {size} a process, estimated: preset {preset} with {batch_size} environments a step"
    free = [gpu["free_gb"] for gpu in get_gpu_info()]
    if free and gigabytes > min(free):
        fits = max(1, int(batch_size * (min(free) - always) / (gigabytes - always)))
        return Finding("model memory", "fail", text, f"type --batch_size {fits}, or a smaller preset")
    return Finding("model memory", "ok", text)


def bytes_needed(task: ClstmPpo, batch_size: int) -> float:
    """Weights, gradients and Adam's state; the days of a rollout; and what a backward pass keeps. An estimate."""
    shape, settings, game = task.shape, task.source.settings, task.game
    state = 16 * sum(p.numel() for p in task.model().parameters())
    seen = 4 * shape.window * shape.features
    environments = batch_size * settings.minibatches
    rollout = 2 * environments * settings.days * seen
    tables = environments * 2 * (shape.window + game.days) * shape.assets * 12
    read = shape.window * shape.hidden * shape.cascade * (shape.variant == "clstm")
    kept = batch_size * settings.days * (2 * seen + 4 * 6 * (read + shape.memory))  # four gates, cell, output
    return state + rollout + tables + kept


def distributed() -> Finding:
    """Two processes that train the smallest agent for a few steps: they start, meet, exchange and agree."""
    try:
        _short_run("tiny", SMOKE_STEPS, nproc=2)
    except Exception as error:  # whatever it is, it is the finding
        return Finding("distributed training", "fail", f"two processes: {error}", "look at the message above")
    return Finding("distributed training", "ok", f"two processes trained {SMOKE_STEPS} steps together")


def time_estimate(preset: str, batch_size: int, num_episodes: int, price: float | None) -> Finding:
    task = ClstmPpo(**ClstmPpo.presets[preset]["task"])
    steps = MEASURED_UPDATES * task.source.settings.epochs * task.source.settings.minibatches
    rate = _short_run(preset, steps, global_batch=batch_size, micro_batch=batch_size)
    hours = num_episodes * task.game.days / rate / 3600
    if price is None and torch.cuda.is_available():
        price = price_per_hour(torch.cuda.get_device_name())
    text = f"{rate:,.0f} environment steps/s measured here: {num_episodes} episodes take {duration(hours)}"
    lines = table(hours, price, {1: rate}) if torch.cuda.is_available() else []
    return Finding("training time", "ok", "\n    ".join([text, *lines]))


def recommendations(findings: Iterable[Finding]) -> Finding:
    gpus = get_gpu_info()
    advice = [finding.advice for finding in findings if finding.advice]
    if len(gpus) > 1:
        advice.append(f"python train_distributed_clstm_ppo.py --num_gpus {len(gpus)}")
        if len({gpu["name"] for gpu in gpus}) > 1:
            advice.append("the GPUs differ: equal shares wait for the slowest one")
    elif gpus:
        advice.append("python train_distributed_clstm_ppo.py --num_gpus 1")
    else:
        advice.append("lockstep train clstm_ppo --nproc 2: minutes on two CPU cores")
    return Finding("recommendations", "ok", "\n    ".join(advice))


def _short_run(preset: str, steps: int, nproc: int | None = None, **more: Any) -> float:
    """Train for a moment, in a folder that is thrown away. Environment steps a second, after the first update."""
    values = {key: value for key, value in ClstmPpo.presets[preset].items() if key not in ("task", "goals")}
    task = ClstmPpo(**ClstmPpo.presets[preset]["task"])
    settings = task.source.settings
    quiet = {"log": {"progress": "off", "every": settings.epochs * settings.minibatches}, "evaluate": {"every": None}}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        wanted = values | quiet | {"preset": None, "steps": steps, "run_dir": str(place)} | more
        lockstep.fit(task, wanted, nproc=nproc)
        return measured_rate(place, settings.epochs)


def main(arguments: Sequence[str] | None = None) -> int:
    """0: ready to train here, on a GPU or not."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Check this machine for training the agent of the recipe clstm_ppo.")
    parser.add_argument("--num_episodes", type=int, default=5000, help="to estimate the time for (default: 5000)")
    parser.add_argument("--preset", choices=list(ClstmPpo.presets), default="gpu" if gpu else "cpu")
    parser.add_argument("--batch_size", type=int, help="environments per GPU and step (default: the preset's)")
    parser.add_argument("--price_per_hour", type=float, help="of one GPU, in dollars (default: by its name)")
    asked = parser.parse_args(arguments)
    batch = asked.batch_size or ClstmPpo.presets[asked.preset]["global_batch"]
    checks: list[Callable[[], Finding]] = [
        cuda,
        nccl,
        memory,
        lambda: need(asked.preset, batch),
        distributed,
        lambda: time_estimate(asked.preset, batch, asked.num_episodes, asked.price_per_hour),
    ]
    findings: list[Finding] = []
    for check in [*checks, lambda: recommendations(findings)]:
        finding = check()
        findings.append(finding)
        print(f"[{finding.state:>4}] {finding.name}: {finding.text}", flush=True)
        if finding.advice:
            print(f"    {finding.advice}", flush=True)
    return int(any(finding.state == "fail" for finding in findings))
