"""Epochs are counted by the data: steps of another size, after a resume, count for what they trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import lockstep
from lockstep.config import RunConfig
from lockstep.data.windows import next_window, steps_before
from lockstep.engine.checks.settings import check_epochs_countable
from lockstep.errors import UserError
from lockstep.task import Loss, Task

SAMPLES = 22


class Counted(Task):
    """Counts how often each sample is trained."""

    def __init__(self) -> None:
        self.trained: Counter[int] = Counter()
        self.evaluated_at: list[float] = []

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def data(self) -> list[Tensor]:
        return [torch.tensor([float(index)]) for index in range(SAMPLES)]

    def eval_data(self) -> list[Tensor]:
        return [torch.zeros(1)]

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        self.trained.update(int(x) for x in batch)
        return Loss((model(batch) * 1e-3).sum(), weight=len(batch))

    def eval_loss(self, model: nn.Module, batch: Tensor) -> Loss:
        return Loss(model(batch).sum(), weight=len(batch))

    def after_eval(self, run: Any, evaluation: Any) -> None:
        self.evaluated_at.append(run.epoch)


def test_epochs_end_after_as_many_passes_at_any_batch_size(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "run_dir": str(tmp_path / "run"),
        "log": {"progress": "off", "every": 1},
        "evaluate": {"epochs": 1},
        "checks": {"loss": "off"},
        "resume": "auto",
    }
    task = Counted()

    # 3 steps of 4 samples leave 10 of 22. The last resume sees no change of the batch size.
    lockstep.fit(task, steps=3, global_batch=4, **settings)
    lockstep.fit(task, steps=5, global_batch=8, **settings)
    done = lockstep.fit(task, epochs=3, global_batch=8, **settings)

    assert task.trained == dict.fromkeys(range(SAMPLES), 3)
    assert [line["step"] for line in done.history][-1] == 3 + 2 + 3 + 3
    assert done.history[-1]["epoch"] == 3
    assert task.evaluated_at == [0.5, 1, 2, 3]  # the first one is at the end of the first part


class SizedStream(IterableDataset):
    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.zeros(8, 1))


class Streamed(Counted):
    def data(self) -> Any:
        return SizedStream()


def test_a_stream_does_not_count_epochs_of_two_batch_sizes(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"run_dir": str(tmp_path / "run"), "log": {"progress": "off"}, "checks": {"loss": "off"}}
    lockstep.fit(Streamed(), epochs=1, global_batch=4, **settings)
    with pytest.raises(UserError, match=r"epochs=2 cannot be counted(.|\n)*changed: 4 -> 8(.|\n)*set steps="):
        lockstep.fit(Streamed(), epochs=2, global_batch=8, resume="auto", **settings)

    # The same batch in another key, and steps in place of epochs.
    lockstep.fit(Streamed(), epochs=2, local_batch=4, resume="auto", **settings)
    lockstep.fit(Streamed(), steps=5, global_batch=8, resume="auto", **settings)


def test_a_stream_does_not_count_epochs_of_two_numbers_of_ranks() -> None:
    """With local_batch a step of three ranks is larger than one of two, though no setting has changed."""
    config = RunConfig(local_batch=4, epochs=2)
    check_epochs_countable(config, 12, 12)
    check_epochs_countable(RunConfig(local_batch=4, steps=2), 8, 12)
    with pytest.raises(UserError, match=r"8 -> 12 \(local_batch=4, on another(.|\n)*resume with global_batch=8"):
        check_epochs_countable(config, 8, 12)
    with pytest.raises(UserError, match=r"evaluate.epochs=0.5 cannot be counted(.|\n)*evaluate.every=100"):
        check_epochs_countable(RunConfig(local_batch=4, steps=9, evaluate={"epochs": 0.5}), 8, 12)


@pytest.mark.parametrize("tail", ["short", "drop"])
def test_windows_count_as_one_step_each(tail: str) -> None:
    position = 0
    for steps in range(12):
        assert steps_before(position, 22, 4, tail) == steps
        window = next_window(position, 22, 4, tail)
        position = window.epoch * 22 + window.stop
