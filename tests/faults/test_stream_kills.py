"""A stream in virtual shards through kills and changes of the number of ranks: every sample once, by the logged ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.runs import Started
from faults.torture import counted, history
from lockstep.faults import Fault

TASK = """
import torch
from torch import nn

from lockstep import Loss, Shards, Task


class Numbers(Task):
    def model(self):
        return nn.Linear(1, 1)

    def data(self):
        files = [list(range(100 * file, 100 * file + 6 + file % 3)) for file in range(8)]
        return Shards(files, shards=4).map(lambda number: torch.tensor([number / 800]))

    def loss(self, model, x):
        return Loss((model(x) - x).square().sum(), weight=len(x))
"""

SAMPLES = sum(6 + file % 3 for file in range(8))
WORDS = ("global_batch=8", "micro_batch=2", "checkpoint.every=2", "log.samples=true", "lr.peak=0.1")


@pytest.mark.long
def test_every_sample_once_at_1_then_3_then_2_ranks_with_kills(tmp_path: Path) -> None:
    (tmp_path / "numbers.py").write_text(TASK)
    target = f"{tmp_path / 'numbers.py'}:Numbers"
    resume = ("--resume", str(tmp_path / "run"))
    first = Started(tmp_path, *WORDS, "steps=5", target=target, nproc=1, faults=(Fault("kill", 0, 3),)).end()
    second = Started(
        tmp_path, *WORDS, *resume, "steps=11", target=target, nproc=3, faults=(Fault("kill", 1, 7), Fault("kill", 0, 9))
    ).end()
    third = Started(
        tmp_path, *WORDS, *resume, "steps=16", "data.workers=1", target=target, nproc=2, faults=(Fault("kill", 1, 13),)
    ).end()
    for ended in (first, second, third):
        assert ended.code == 0, ended.output
    assert "restarting" in first.output
    assert second.output.count("restarting") == 2

    # By epoch: how many samples, and how often each at most. The third epoch has only begun.
    epochs = counted(history(tmp_path / "run"))
    assert epochs["0"] == epochs["1"] == (SAMPLES, 1)
    assert epochs["2"][1] == 1
