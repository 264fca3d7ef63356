"""A run keeps its checkpoints in any store: here in memory, with nothing on the disk to resume from."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checkpoint.manager import CheckpointManager, config_changes
from lockstep.checkpoint.storage import MemoryStore, committed
from lockstep.config import flatten, resolve
from lockstep.config.schema import typed
from lockstep.engine import setup
from lockstep.errors import Preempted
from lockstep.testing import fail_at


class Dropped(lockstep.Task):
    defaults = {"global_batch": 16, "steps": 12, "log": {"progress": "off"}}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def data(self) -> Any:
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(dim=1, keepdim=True))

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        x, y = batch
        return lockstep.Loss(((model(x) - y) ** 2).sum(), weight=len(x))


def test_a_run_is_preempted_and_resumes_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = lockstep.fit(Dropped(), run_dir=tmp_path / "undisturbed")

    store = MemoryStore()
    monkeypatch.setattr(setup, "CheckpointManager", partial(CheckpointManager, store=store))
    run_dir = tmp_path / "parts"
    with fail_at(how="term", step=4), pytest.raises(Preempted) as preempted:
        lockstep.fit(Dropped(), run_dir=run_dir)
    assert preempted.value.checkpoint is not None
    assert preempted.value.checkpoint.endswith("memory:checkpoints/step-00000005")
    resumed = lockstep.fit(Dropped(), run_dir=run_dir, resume="auto")

    assert [checkpoint.step for checkpoint in committed(store)] == [12, 5]
    assert list((run_dir / "checkpoints").iterdir()) == []
    for name, weight in undisturbed.weights.items():
        assert torch.equal(resumed.weights[name], weight), name


def test_settings_saved_under_a_former_name_are_compared_under_the_present_one():
    config = resolve([("argument", {"load_balance": "auto"})]).config
    saved = {key: typed(value) for key, value in flatten(config).items()}
    value = saved.pop("load_balance")
    assert config_changes({**saved, "speed_weights": value}, config) == []
    (change,) = config_changes({**saved, "speed_weights": "none"}, config)
    assert str(change) == f"load_balance: none -> {value}"
