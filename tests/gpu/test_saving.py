"""Checkpoints of a model of some size, written while a GPU goes on training it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checkpoint.loading.search import VerifyingRanks, newest_valid
from lockstep.checkpoint.storage.folder import CheckpointStorage
from lockstep.observe.sinks import read_jsonl

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Large(lockstep.Task):
    """About 200 MB with AdamW: copying takes longer than the host needs to reach the next update."""

    defaults = {"global_batch": 8, "precision": "fp32", "compile": False, "log": {"progress": "off"}}

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))

    def data(self) -> Any:
        return TensorDataset(torch.randn(400, 1024, generator=torch.Generator().manual_seed(0)))

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        return lockstep.Loss(model(batch[0]).square().sum(), weight=len(batch[0]))


def tensors(run: Path) -> dict[str, torch.Tensor]:
    found = newest_valid(CheckpointStorage(run / "checkpoints"), VerifyingRanks.alone())
    assert found is not None
    reader = found.reader
    return {name: reader.read(name) for name in reader.names()}


def test_every_save_is_committed_and_holds_the_state_of_its_step(tmp_path: Path) -> None:
    values = {"checkpoint": {"every": 3, "keep": 100, "at_end": False}}
    lockstep.fit(Large(), steps=31, run_dir=tmp_path / "long", **values)
    events = read_jsonl(tmp_path / "long" / "events.jsonl")
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == list(range(3, 31, 3))
    warnings = [event["reason"] for event in events if event["event"] == "warning"]
    assert not [reason for reason in warnings if "it waits for data" not in reason]  # which this machine may be
    # The same state as that of a run which ended there, and had nothing to do while it was copied.
    lockstep.fit(Large(), steps=30, run_dir=tmp_path / "short", **values)
    long, short = tensors(tmp_path / "long"), tensors(tmp_path / "short")
    assert long.keys() == short.keys()
    assert all(torch.equal(long[name], short[name]) for name in long)
