"""A GPT whose training state is larger than the memory it may take: refused with advice, trained as advised."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.observe.sinks import read_jsonl

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.long]

# 85 million parameters, 16 bytes each, are 1.3 GiB.
MODEL = ["task.width=768", "task.layers=12", "task.heads=12", "task.context=256", "task.dropout=0"]
SETTINGS = [
    *("preset=gpu", *MODEL, "task.max_bytes=1000000", "steps=4", "global_batch=16", "micro_batch=8", "lr.peak=1e-4"),
    *("compile=false", "evaluate.every=null", "evaluate.at_end=false", "checkpoint.at_end=false"),
    *("log.every=1", "log.progress=off"),
]
CAP = "gpu_memory=1.1"
ADVISED = ["strategy=fsdp", "fsdp.offload=true", "remat=full"]


def train(run_dir: Path, *words: str, ranks: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lockstep", "train", "char_lm", "--nproc", str(ranks), *SETTINGS, *words]
    return subprocess.run([*command, f"run_dir={run_dir}"], capture_output=True, text=True, check=False)


def mean_loss(run_dir: Path) -> float:
    """Return the mean over all steps. Single lines cannot be compared: a GPU's outcomes may come a step late."""
    known = [line for line in read_jsonl(run_dir / "metrics.jsonl") if line["loss"] is not None]
    return sum(line["loss"] * line["weight"] for line in known) / sum(line["weight"] for line in known)


def test_what_does_not_fit_is_refused_with_advice_that_trains_to_the_same_loss(tmp_path: Path) -> None:
    refused = train(tmp_path / "ddp", CAP, ranks=1)
    assert refused.returncode != 0
    assert all(word in refused.stderr for word in ADVISED), refused.stderr

    for name, words, ranks in (("advised", [CAP, *ADVISED], 2), ("free", [], 1)):
        done = train(tmp_path / name, *words, ranks=ranks)
        assert done.returncode == 0, done.stderr
    assert mean_loss(tmp_path / "advised") == pytest.approx(mean_loss(tmp_path / "free"), rel=0.01)
