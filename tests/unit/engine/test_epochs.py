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
from lockstep.data.windows import next_window, steps_before
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
    with pytest.raises(UserError, match=r"epochs=2 cannot be counted(.|\n)*global_batch: 4 -> 8(.|\n)*set steps="):
        lockstep.fit(Streamed(), epochs=2, global_batch=8, resume="auto", **settings)


@pytest.mark.parametrize("tail", ["short", "drop"])
def test_windows_count_as_one_step_each(tail: str) -> None:
    position = 0
    for steps in range(12):
        assert steps_before(position, 22, 4, tail) == steps
        window = next_window(position, 22, 4, tail)
        position = window.epoch * 22 + window.stop
