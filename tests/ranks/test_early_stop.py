"""Early stopping: all ranks stop at the same step, also after a resume on another number of ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.config.sections import StopConfig
from lockstep.engine.evaluation.early_stop import EarlyStop
from lockstep.errors import UserError
from lockstep.observe.sinks import read_jsonl
from lockstep.task import Loss
from pool import Pool
from ranks.support import Regression, assert_user_errors, fit

BASE = {"global_batch": 8, "micro_batch": 2, "steps": 20, "evaluate.every": 2, "evaluate.batch": 4, "stop.patience": 3}


class Stuck(Regression):
    """Its evaluations never improve."""

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.0)

    def eval_data(self) -> Any:
        return TensorDataset(torch.ones(4, 5), torch.ones(4))

    def eval_loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(torch.tensor(8.0), 4)


@pytest.mark.parametrize("world", [1, 3])
def test_all_ranks_stop_together(pool: Pool, tmp_path: Path, world: int) -> None:
    traces = pool.run(fit, Stuck(), BASE | {"run_dir": str(tmp_path)}, world=world)
    # The first evaluation is the best; three more follow.
    assert [trace.summary["step"] for trace in traces] == [8] * world
    reason = "eval_loss has not improved in 3 evaluations: the best was 2 at step 2"
    assert traces[0].summary["stopped"] == reason
    assert (tmp_path / "model.safetensors").exists()


def test_a_resumed_run_stops_at_the_same_step_and_a_stopped_one_stays_stopped(pool: Pool, tmp_path: Path) -> None:
    values = BASE | {"run_dir": str(tmp_path), "checkpoint.every": 1}
    pool.run(fit, Stuck(), values | {"steps": 5}, world=2)
    traces = pool.run(fit, Stuck(), values | {"resume": "auto"}, world=3)
    assert [trace.summary["step"] for trace in traces] == [8] * 3

    (stopped,) = pool.run(fit, Stuck(), values | {"resume": "auto"}, world=1)
    assert (stopped.summary["step"], stopped.steps) == (8, [])
    (longer,) = pool.run(fit, Stuck(), values | {"resume": "auto", "stop.patience": 4}, world=1)
    assert longer.summary["step"] == 10


def test_a_run_ends_when_its_time_is_over(pool: Pool, tmp_path: Path) -> None:
    values = BASE | {"run_dir": str(tmp_path), "stop.patience": None, "stop.max_minutes": 1e-9}
    traces = pool.run(fit, Stuck(), values, world=2)
    assert [trace.summary["step"] for trace in traces] == [2, 2]  # rank 0 requests it after step 1
    assert traces[0].summary["stopped"] == "stop.max_minutes=1e-09 is over"


class ManyMetrics(Regression):
    """It counts its calls, draws, and has a metric that the first batch lacks."""

    calls = 0

    def eval_data(self) -> Any:
        return TensorDataset(torch.ones(12, 5), torch.arange(12.0))

    def eval_loss(self, model: nn.Module, batch: Any) -> Loss:
        self.calls += 1
        late = {"late": batch[1].sum()} if batch[1].max() > 8 else {}
        return Loss(model(batch[0]).sum() + torch.rand(()), 4, {"calls": (self.calls, 1)} | late)


SPELLINGS = [
    ({"stop.metric": "lat"}, 2, "set stop.metric=late"),
    ({"checkpoint.best": "cals", "strategy": "fsdp"}, 2, "set checkpoint.best=calls"),
    ({"stop.metric": "eval/loss"}, 1, "set stop.metric=eval_loss"),
]


@pytest.mark.parametrize(("values", "world", "fix"), SPELLINGS)
def test_a_misspelt_metric_is_found_before_the_first_step(
    pool: Pool, tmp_path: Path, values: dict[str, Any], world: int, fix: str
) -> None:
    values = BASE | {"run_dir": str(tmp_path)} | values
    errors = pool.errors(fit, ManyMetrics(), values, world=world)
    assert_user_errors(errors, "is not a result of the evaluation", "eval_loss, calls, late", fix)
    assert not [event for event in read_jsonl(tmp_path / "events.jsonl") if event["event"] in ("step", "eval")]
    assert not read_jsonl(tmp_path / "metrics.jsonl")


def test_looking_for_a_metric_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    found = []
    for name, metric in {"plain": "eval_loss", "first": "calls", "all": "late"}.items():
        values = BASE | {"run_dir": str(tmp_path / name), "stop.metric": metric, "steps": 4}
        (trace,) = pool.run(fit, ManyMetrics(), values, world=1)
        found.append((trace.summary["eval_loss"], trace.summary["eval_metrics"], trace.summary["loss"]))
    assert found[0] == found[1] == found[2]
    assert found[0][1]["calls"] > 1


def test_what_counts_as_an_improvement() -> None:
    stop = EarlyStop(StopConfig(patience=2, metric="accuracy", mode="max", min_delta=0.1))
    for step, accuracy in enumerate([math.nan, 0.5, 0.55, 0.7, math.nan, 0.75]):
        assert stop.reason is None
        stop.observe({"eval_loss": 1.0, "accuracy": accuracy}, step)
    assert stop.reason == "accuracy has not improved in 2 evaluations: the best was 0.7 at step 3"

    with pytest.raises(UserError, match=r"stop\.metric=accuracy is not a result(.|\n)*eval_loss, top5"):
        stop.observe({"eval_loss": 1.0, "top5": 0.5}, 9)
