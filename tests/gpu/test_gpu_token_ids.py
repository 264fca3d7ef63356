"""A token id beyond the vocabulary stops a kernel, and the error still names the sample."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: run it on one, see CONTRIBUTING.md")

TASK = """
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import Loss, Task


class Reader(Task):
    def __init__(self, *, bad: int = 17):
        self.bad = bad

    def model(self):
        return nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))

    def data(self):
        tokens = torch.randint(10, (24, 6), generator=torch.Generator().manual_seed(0))
        tokens[self.bad, 2] = 12
        return list(tokens)

    def loss(self, model, tokens):
        return Loss(F.cross_entropy(model(tokens).mT, tokens.clamp(max=9), reduction="sum"), tokens.numel())
"""


@pytest.mark.parametrize("bad", range(0, 24, 8))
def test_the_sample_is_named(tmp_path: Path, bad: int) -> None:
    """In a process of its own, because no other can use its GPU after this error."""
    (tmp_path / "reader.py").write_text(TASK)
    words = ["reader.py:Reader", f"task.bad={bad}", "global_batch=4", "steps=12", "device=cuda", "run_dir=run"]
    command = [sys.executable, "-m", "lockstep", "train", *words]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 2, output
    assert "token id 12 is out of range: 0.weight has 10 rows, from 0 to 9" in output
    assert f"sample {bad} in epoch 0 has it" in output
