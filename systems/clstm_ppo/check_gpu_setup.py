"""Check whether this machine can train the trading agent, and what to do if it cannot: python check_gpu_setup.py"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import lockstep
from gpu_optimizations import duration, get_gpu_info, measured_rate, price_here, speedup_table
from lockstep.recipes.clstm_ppo import ClstmPpo

SMOKE_STEPS = 4
MEASURED_UPDATES = 3


@dataclass(frozen=True)
class Finding:
    """The result of one check; `advice` says what to do about it."""

    name: str
    state: Literal["ok", "note", "fail"]
    text: str
    advice: str = ""


def cuda() -> Finding:
    if torch.cuda.is_available():
        return Finding("CUDA", "ok", f"{torch.cuda.device_count()} GPUs, CUDA {torch.version.cuda}")
    # A torch that was built for GPUs, on a machine where none is visible.
    if torch.version.cuda or torch.version.hip:
        text = f"no GPU is visible, though torch {torch.__version__} could use one"
        return Finding("CUDA", "note", text, "look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    advice = "install a torch with CUDA to train on GPUs; the preset cpu needs none"
    return Finding("CUDA", "note", f"torch {torch.__version__} is for CPUs only", advice)


def nccl() -> Finding:
    if not torch.cuda.is_available():
        return Finding("NCCL", "note", "not needed: processes on CPUs talk over gloo")
    if torch.distributed.is_nccl_available():
        version = ".".join(str(part) for part in torch.cuda.nccl.version())
        return Finding("NCCL", "ok", f"version {version}")
    return Finding("NCCL", "fail", "this torch has none", "install a torch with NCCL, or train on one GPU")


def gpu_memory() -> Finding:
    gpus = get_gpu_info()
    if not gpus:
        return Finding("GPU memory", "note", "no GPU")
    text = ", ".join(f"GPU {gpu['index']} {gpu['free_gb']:.1f} of {gpu['memory_gb']:.1f} GB free" for gpu in gpus)

    # Below 80 % of the memory something else must be running there.
    for gpu in gpus:
        if gpu["free_gb"] < 0.8 * gpu["memory_gb"]:
            return Finding("GPU memory", "note", text, f"another process uses GPU {gpu['index']}: see nvidia-smi")
    return Finding("GPU memory", "ok", text)


def model_memory(preset: str, batch_size: int) -> Finding:
    """Compare what a process needs with the free memory of the fullest GPU."""
    task = _preset_task(preset)
    needed = bytes_needed(task, batch_size) / 2**30
    size = f"{needed:.1f} GB" if needed >= 0.1 else f"{needed * 1024:.1f} MB"
    text = f"about {size} a process, estimated: preset {preset} with {batch_size} environments a step"

    free = min((gpu["free_gb"] for gpu in get_gpu_info()), default=None)
    if free is None or needed <= free:
        return Finding("model memory", "ok", text)

    # What every environment adds is in proportion; the weights stay.
    fixed = bytes_needed(task, 0) / 2**30
    fits = max(1, int(batch_size * (free - fixed) / (needed - fixed)))
    return Finding("model memory", "fail", text, f"type --batch_size {fits}, or a smaller preset")


def bytes_needed(task: ClstmPpo, batch_size: int) -> float:
    """Estimate the bytes of weights, gradients and Adam's state, of a rollout, and of what a backward pass keeps."""
    shape, options = task.shape, task.source.options
    # Four float32 numbers for each parameter.
    state = 16 * sum(p.numel() for p in task.model().parameters())
    window = 4 * shape.window * shape.features

    # The days of a rollout, and the tables of two episodes for each environment.
    environments = batch_size * options.minibatches
    rollout = 2 * environments * options.rollout * window
    tables = environments * 2 * (shape.window + shape.episode) * shape.assets * 12

    # The backward pass needs the four gates, the cell and the output of every LSTM.
    reader = shape.window * shape.hidden * shape.cascade * (shape.variant == "clstm")
    activations = batch_size * options.rollout * (2 * window + 4 * 6 * (reader + shape.memory))
    return state + rollout + tables + activations


def distributed() -> Finding:
    """Let two processes train the smallest agent for a few steps: they start, meet, all-reduce and agree."""
    try:
        _short_run("tiny", SMOKE_STEPS, nproc=2)
    except Exception as error:  # any failure at all is what this check is to find
        return Finding("distributed training", "fail", f"two processes: {error}", "look at the message above")
    return Finding("distributed training", "ok", f"two processes trained {SMOKE_STEPS} steps together")


def time_estimate(preset: str, batch_size: int, num_episodes: int, price: float | None) -> Finding:
    """Measure a few updates, and estimate the time of `num_episodes` from them."""
    task = _preset_task(preset)
    steps = MEASURED_UPDATES * task.source.options.steps

    # On one process; other numbers of GPUs are estimated from it.
    rate = _short_run(preset, steps, global_batch=batch_size, micro_batch=batch_size)
    hours = num_episodes * task.shape.episode / rate / 3600
    text = f"{rate:,.0f} environment steps/s measured here: {num_episodes} episodes take {duration(hours)}"
    lines = []
    if torch.cuda.is_available():
        lines = speedup_table(hours, price_here() if price is None else price, {1: rate})
    return Finding("training time", "ok", "\n    ".join([text, *lines]))


def recommendations(findings: Iterable[Finding]) -> Finding:
    gpus = get_gpu_info()
    advice = [finding.advice for finding in findings if finding.advice]
    if gpus:
        advice.append(f"python train_distributed_clstm_ppo.py --num_gpus {len(gpus)}")
    else:
        advice.append("lockstep train clstm_ppo --nproc 2: minutes on two CPU cores")
    if len({gpu["name"] for gpu in gpus}) > 1:
        advice.append("the GPUs differ: equal shares wait for the slowest one")
    return Finding("recommendations", "ok", "\n    ".join(advice))


def _preset_task(preset: str) -> ClstmPpo:
    return ClstmPpo(**ClstmPpo.presets[preset]["task"])


def _short_run(preset: str, steps: int, nproc: int | None = None, **more: Any) -> float:
    """Train for a moment in a temporary folder. Returns environment steps per second after the first update."""
    task = _preset_task(preset)
    options = task.source.options
    # Goals belong to a whole run, and options have gone into the task.
    values = {key: value for key, value in ClstmPpo.presets[preset].items() if key not in ("task", "goals")}
    values |= {
        "preset": None,
        "steps": steps,
        "log": {"progress": "off", "every": options.steps},
        "evaluate": {"every": None},
    }
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        lockstep.fit(task, values | {"run_dir": str(run_dir)} | more, nproc=nproc)
        return measured_rate(run_dir, options.epochs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print all checks. Returns 0 if this machine can train, on GPUs or without."""
    parser = argparse.ArgumentParser(description="Check this machine for training the agent of the recipe clstm_ppo.")
    parser.add_argument("--num_episodes", type=int, default=5000, help="to estimate the time for (default: 5000)")
    parser.add_argument(
        "--preset", choices=list(ClstmPpo.presets), default="gpu" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--batch_size", type=int, help="environments per GPU and step (default: the preset's)")
    parser.add_argument("--price_per_hour", type=float, help="of one GPU, in dollars (default: by its name)")
    options = parser.parse_args(arguments)

    batch = options.batch_size or ClstmPpo.presets[options.preset]["global_batch"]
    findings: list[Finding] = []
    checks: list[Callable[[], Finding]] = [
        cuda,
        nccl,
        gpu_memory,
        lambda: model_memory(options.preset, batch),
        distributed,
        lambda: time_estimate(options.preset, batch, options.num_episodes, options.price_per_hour),
        lambda: recommendations(findings),
    ]

    # Each finding is printed at once: some checks take a while.
    for check in checks:
        finding = check()
        findings.append(finding)
        print(f"[{finding.state:>4}] {finding.name}: {finding.text}", flush=True)
        if finding.advice:
            print(f"    {finding.advice}", flush=True)
    return int(any(finding.state == "fail" for finding in findings))


if __name__ == "__main__":
    raise SystemExit(main())
