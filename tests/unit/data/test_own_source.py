"""A batch source of the user's own: the four methods that must be written are enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import UserError
from lockstep.task import BatchSource, Loss, MicroBatch, StepBatches, StepResult, Task


class Counting(BatchSource):
    """Batches with the number of the step in them."""

    def __init__(self) -> None:
        self.position = 0

    def take(self) -> StepBatches:
        micro = MicroBatch(torch.full((2, 1), float(self.position)), index=0, samples=2)
        return StepBatches(1, [micro], samples=2)

    def commit(self, batches: StepBatches, result: StepResult | None) -> None:
        self.position += 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Counted(Task):
    def __init__(self, source: Any) -> None:
        self.source = source
        self.seen: list[int] = []

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def data(self) -> Any:
        return self.source

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.seen.append(int(batch[0, 0]))
        return Loss(model(batch).sum(), weight=len(batch))


def test_four_methods_train_and_resume(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"global_batch": 2, "run_dir": str(tmp_path / "run"), "log": {"progress": "off"}}
    first, second = Counted(Counting()), Counted(Counting())
    lockstep.fit(first, steps=3, **settings)
    lockstep.fit(second, steps=5, resume=str(tmp_path / "run"), **settings)
    assert (first.seen, second.seen) == ([0, 1, 2], [3, 4])


def test_a_source_without_the_base_class_is_refused(tmp_path: Path) -> None:
    class Bare:
        def take(self) -> None: ...

        def commit(self, batches: Any, result: Any) -> None: ...

    with pytest.raises(UserError, match=r"must derive from lockstep.BatchSource(.|\n)*class Bare\(lockstep.Batch"):
        lockstep.fit(Counted(Bare()), steps=1, global_batch=2, run_dir=str(tmp_path / "run"))


def test_a_policy_that_rewinds_needs_a_source_that_can_skip(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot skip samples"):
        lockstep.fit(
            Counted(Counting()), steps=1, global_batch=2, run_dir=str(tmp_path / "run"), nonfinite={"policy": "rewind"}
        )


@pytest.mark.parametrize("setting", [{"shuffle": False}, {"workers": 2}, {"resume": "reread"}, {"sharding": "own"}])
def test_settings_about_reading_are_refused(tmp_path: Path, setting: dict[str, Any]) -> None:
    (key,) = setting
    with pytest.raises(
        UserError, match=rf"data\.{key}=\w+ has no effect: the training data is a batch source, Counting"
    ):
        lockstep.fit(Counted(Counting()), steps=1, global_batch=2, run_dir=str(tmp_path / "run"), data=setting)
