"""Trainings that benchmarks start as processes of their own, and what they leave in their folders."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from lockstep.observe.sinks import read_jsonl

# The first steps of the recipe char_lm on a GPU, each with its line in metrics.jsonl, and nothing else.
FIRST_STEPS = [
    "preset=gpu",
    "task.dropout=0",
    "task.max_bytes=1000000",
    "compile=false",
    "evaluate.at_end=false",
    "evaluate.every=null",
    "checkpoint.at_end=false",
    "log.every=1",
    "log.progress=off",
]


def chosen(*words: str) -> list[str]:
    """Of `key=value` words with the same key the last counts: `lockstep train` refuses a key that stands twice."""
    return list({word.partition("=")[0]: word for word in words}.values())


def command(recipe: str, run_dir: Path, *words: str, ranks: int | None = None) -> list[str]:
    """`lockstep train`; with a number of ranks under the launcher, otherwise as one process alone."""
    launcher = [] if ranks is None else ["--nproc", str(ranks)]
    return [sys.executable, "-m", "lockstep.cli", "train", recipe, *launcher, *chosen(*words), f"run_dir={run_dir}"]


def train(recipe: str, run_dir: Path, *words: str, ranks: int) -> subprocess.CompletedProcess[str]:
    """To its end, whatever that is; what it says is kept. Whoever stops the benchmark stops the training too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    asked = command(recipe, run_dir, *words, ranks=ranks)
    return subprocess.run(asked, capture_output=True, text=True, check=False)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return read_jsonl(run_dir / "metrics.jsonl")


def mean_loss(lines: list[dict[str, Any]]) -> float:
    """Over all steps. Single lines cannot be compared: a GPU's outcomes may come a step late."""
    known = [line for line in lines if line["loss"] is not None]
    return sum(line["loss"] * line["weight"] for line in known) / sum(line["weight"] for line in known)
