"""A batch source of the user's own: the four methods that must be written are enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep.engine.run import Run
from lockstep.errors import UserError
from lockstep.start_check.data import take_and_compare
from lockstep.task import BatchSource, Loss, MicroBatch, StepBatches, StepResult, Task
from lockstep.testing import fail_at


class Counting(BatchSource):
    """Batches with the number of the step in them."""

    def __init__(self) -> None:
        self.position = 0

    def take(self) -> StepBatches:
        micro = MicroBatch(torch.full((2, 1), float(self.position)), index=0, num_samples=2)
        return StepBatches(1, [micro], global_num_samples=2)

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


class Same(Counting):
    """The same object in every step, with a list of micro-batches that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = super().take()

    def take(self) -> StepBatches:
        return self.batches


@pytest.mark.parametrize("compares", [True, False])
def test_a_source_may_return_the_same_batches_in_every_step(
    tmp_path: Path, compares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Counted(Same())
    settings: dict[str, Any] = {"run_dir": str(tmp_path / "run"), "log": {"progress": "off"}}
    if compares:  # as on several ranks
        monkeypatch.setattr(Run, "_take_first", lambda run: take_and_compare(run.source, run.runtime, 0))
    lockstep.fit(task, steps=3, global_batch=2, **settings)
    assert task.seen == [0, 0, 0]
    assert task.source.batches.step == 0


def test_the_banner_does_not_call_a_source_a_stream_without_a_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lockstep.fit(Counted(Counting()), steps=3, global_batch=2, run_dir=str(tmp_path / "run"))
    assert "a batch source, 3 steps" in capsys.readouterr().out


class WithOrder(Counting):
    """A source may keep its samples under any name. `order` was taken for that of Lockstep's own sources."""

    order = (3, 1, 2)


def test_an_order_of_its_own_is_no_step_order(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"global_batch": 2, "run_dir": str(tmp_path / "run"), "log": {"progress": "off"}}
    lockstep.fit(Counted(WithOrder()), steps=3, **settings)
    resumed = Counted(WithOrder())
    lockstep.fit(resumed, steps=5, resume=str(tmp_path / "run"), **settings)
    assert resumed.seen == [3, 4]

    with pytest.raises(UserError, match="exact=true cannot be used with data from a WithOrder"):
        lockstep.fit(Counted(WithOrder()), steps=1, global_batch=2, run_dir=str(tmp_path / "exact"), exact=True)


@pytest.mark.parametrize("step", [0, 2])
def test_an_injected_fault_spares_the_start_check_and_the_users_own_loss(tmp_path: Path, step: int) -> None:
    made: list[Loss] = []

    class Kept(Counted):
        def data(self) -> Any:
            return torch.ones(8, 1)

        def loss(self, model: nn.Module, batch: Any) -> Loss:
            made.append(super().loss(model, batch))
            return made[-1]

    with fail_at(how="nan", step=step):
        done = lockstep.fit(Kept(None), steps=3, global_batch=2, run_dir=str(tmp_path / "run"))
    assert (done.summary["applied"], done.summary["skipped"]) == (2, 1)
    assert all(loss.total.isfinite() for loss in made)


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
