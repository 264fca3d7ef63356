"""Evaluations are tried before the first step, and training does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.observe.sinks import read_jsonl
from lockstep.task import EvalData, Loss
from pool import Pool
from ranks.support import Regression, assert_user_errors, fit

BASE = {"global_batch": 8, "micro_batch": 2, "steps": 3, "checks.loss": "all"}


class Noisy(Dataset):
    """Its samples come from a generator of its own, and it counts them."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.read = 0

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read += 1
        return torch.randn(5, generator=self.generator), torch.rand(())


class Detector(nn.Module):
    """It returns its losses in training, and something else in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        boxes = self.body(x)[:, 0]
        return {"box": ((boxes - y) ** 2).sum()} if self.training else [boxes]


class Detects(Regression):
    def model(self) -> nn.Module:
        return Detector()

    def eval_data(self) -> Any:
        return Noisy()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(sum(model(*batch).values()), len(batch[0]))


class Measures(Detects):
    """It has a loss for eval mode, which draws and counts its calls."""

    calls = 0

    def eval_loss(self, model: nn.Module, batch: Any) -> Loss:
        self.calls += 1
        (boxes,) = model(*batch)
        return Loss((boxes - torch.rand(())).sum(), len(boxes), {"calls": (self.calls, 1)})


@pytest.mark.parametrize(("world", "strategy"), [(1, "ddp"), (2, "ddp"), (2, "fsdp")])
def test_a_loss_that_fails_in_eval_mode_is_found_before_the_first_step(
    pool: Pool, tmp_path: Path, world: int, strategy: str
) -> None:
    errors = pool.errors(fit, Detects(), BASE | {"run_dir": str(tmp_path), "strategy": strategy}, world=world)
    assert len(errors) == world
    problem = "the evaluation would fail: AttributeError: 'list' object has no attribute 'values'"
    line = "return Loss(sum(model(*batch).values()), len(batch[0]))"
    assert_user_errors(errors, problem, "test_first_evaluation.py:", line, "define eval_loss(self, model, batch)")
    assert not [event for event in read_jsonl(tmp_path / "events.jsonl") if event["event"] == "step"]


@pytest.mark.parametrize("off", [{"evaluate.at_end": False}, {"evaluate.at_end": False, "data.workers": 1}])
def test_a_run_that_never_evaluates_is_not_stopped(pool: Pool, off: dict[str, Any]) -> None:
    assert [trace.summary["step"] for trace in pool.run(fit, Detects(), BASE | off, world=2)] == [3, 3]


class Chooses(Measures):
    """The loss of one of its sets needs a whole batch, and another one of them fails."""

    def __init__(self, fails: bool):
        super().__init__()
        self.fails = fails

    def eval_data(self) -> Any:
        return {"all": EvalData(Noisy(), loss=self.whole, batch=10), "rest": EvalData(Noisy(), loss=self.rest)}

    def whole(self, model: nn.Module, batch: Any) -> Loss:
        assert len(batch[0]) == 10, "a whole batch"
        return self.eval_loss(model, batch)

    def rest(self, model: nn.Module, batch: Any) -> Loss:
        return self.loss(model, batch) if self.fails else self.eval_loss(model, batch)


def test_a_set_may_need_a_whole_batch_and_one_that_fails_is_named(pool: Pool) -> None:
    assert pool.run(fit, Chooses(fails=False), BASE, world=2)[0].summary["step"] == 3
    errors = pool.errors(fit, Chooses(fails=True), BASE, world=2)
    assert_user_errors(errors, "the evaluation of 'rest' would fail", "do:    correct it")


@pytest.mark.parametrize("values", [{}, {"data.workers": 1}, {"strategy": "fsdp"}])
def test_the_first_evaluation_changes_nothing(pool: Pool, tmp_path: Path, values: dict[str, Any]) -> None:
    """With checks.loss=off nothing is tried; the check of the loss itself changes nothing either."""
    found = []
    for name, checks in {"tried": {}, "off": {"checks.loss": "off"}}.items():
        settings = BASE | {"evaluate.every": 2, "run_dir": str(tmp_path / name)} | values | checks
        trace = pool.run(fit, Measures(), settings, world=2)[0]
        results = [trace.summary[key] for key in ("loss", "eval_loss", "eval_metrics")]
        found.append((results, (tmp_path / name / "model.safetensors").read_bytes()))

    assert found[0] == found[1]
