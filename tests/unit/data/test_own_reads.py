"""A dataset that keeps what it read last is not taken for one that its user changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

import lockstep
from lockstep.data.worker_copies import plain_attributes


class Chunks(Dataset):
    """Keeps the newest chunk of samples."""

    def __init__(self) -> None:
        self.number, self.chunk = -1, torch.zeros(0)
        self.rows = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        if index // 10 != self.number:
            self.number = index // 10
            self.chunk = self.rows[self.number * 10 : self.number * 10 + 10].clone()
        return self.chunk[index % 10]


class Regression(lockstep.Task):
    def __init__(self, empties: bool = False, changes: bool = False):
        self.empties, self.changes = empties, changes
        self.dataset = Chunks()

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def data(self) -> Any:
        return self.dataset

    def eval_data(self) -> Any:
        return self.dataset

    def collate(self, samples: list[Any]) -> Any:
        kept = [sample for sample in samples if sample[0] > 0] if self.empties else samples
        return default_collate(kept) if kept else None

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        self.dataset.epoch += self.changes
        return lockstep.Loss(model(batch).square().sum(), weight=len(batch))


def train(task: Regression, folder: Path, **values: Any) -> int:
    values = {"steps": 8, "global_batch": 8, "micro_batch": 1, "device": "cpu", "evaluate": {"every": 2}} | values
    return lockstep.fit(task, run_dir=str(folder), log={"progress": "off"}, **values).summary["applied"]


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("empties", [True, False])
def test_what_lockstep_reads_itself_is_no_change(empties: bool, seeded: bool, tmp_path: Path) -> None:
    """It reads for the check at the start, in place of an emptied micro-batch, and in evaluations of the same data."""
    assert train(Regression(empties), tmp_path, data={"workers": 1, "seed_samples": seeded}) == 8


def test_a_change_by_the_user_is_still_refused(tmp_path: Path) -> None:
    """Though the dataset is read in this process, by an evaluation, before the next step."""
    with pytest.raises(lockstep.UserError, match="dataset's epoch was changed after its worker processes"):
        train(Regression(changes=True), tmp_path, data={"workers": 1}, evaluate={"every": 1})


def test_a_dataset_that_looks_its_attributes_up_by_itself() -> None:
    class Odd:
        size = 3

        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    assert plain_attributes(Odd()) == {"size": 3}


class Curriculum(Regression):
    """Harder samples after every step, on all ranks alike."""

    def after_step(self, run: Any, result: Any) -> None:
        self.dataset.epoch += 1


def test_a_curriculum_has_two_ways_out(tmp_path: Path) -> None:
    with pytest.raises(lockstep.UserError, match="dataset's epoch was changed") as caught:
        train(Curriculum(), tmp_path / "refused", data={"workers": 1})
    assert "set data.workers=0" in caught.value.fix
    assert "only your sampler reads it, say, set checks.first_batch=false" in caught.value.fix
    assert train(Curriculum(), tmp_path / "here", data={"workers": 0}) == 8
    assert train(Curriculum(), tmp_path / "unseen", data={"workers": 1}, checks={"first_batch": False}) == 8
