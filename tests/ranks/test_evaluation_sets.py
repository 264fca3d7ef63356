"""When a run evaluates, and on which sets: several by name, one of which is monitored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.config.sections import EvaluateConfig
from lockstep.engine.evaluation.evaluator import check_data, evaluation_sets
from lockstep.engine.evaluation.schedule import EvaluationSchedule
from lockstep.errors import UserError
from lockstep.observe.report import write_report
from lockstep.observe.sinks import read_jsonl
from lockstep.observe.sinks.sink import scalars
from lockstep.task import EvalData, Loss
from pool import Pool
from ranks.support import Regression, fit

BASE = {"global_batch": 8, "micro_batch": 2, "steps": 10, "evaluate.batch": 4, "checkpoint.at_end": False}


class TwoSets(Regression):
    """`val` gets better, `odd` stays as it is: whether a run stops depends on the one that is monitored."""

    def eval_data(self) -> Any:
        x, y = self.data()[:14]
        return {"val": TensorDataset(x, y), "odd": TensorDataset(x[:5], torch.full((5,), 50.0))}

    def eval_loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = self.loss(model, batch)
        total = batch[1].sum() if float(batch[1][0]) == 50 else loss.total
        return Loss(total, loss.weight, {"target": batch[1].sum()})


def evals(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(folder / "events.jsonl") if event["event"] == "eval"]


def test_sets_have_names_and_one_is_monitored(pool: Pool, tmp_path: Path) -> None:
    values = BASE | {"evaluate.every": 5, "checkpoint.best": "odd/target", "goals": ["odd/loss <= 9000"]}
    (one,) = pool.run(fit, TwoSets(), values | {"run_dir": str(tmp_path / "1")}, world=1)
    found = pool.run(fit, TwoSets(), values | {"run_dir": str(tmp_path / "2"), "evaluate.monitor": "odd"}, world=2)

    # The same floats on two ranks; the monitored one is called eval_loss.
    assert found[0].summary["evaluations"] == one.summary["evaluations"] == found[1].summary["evaluations"]
    assert one.summary["eval_loss"] == one.summary["evaluations"]["val"]["val/loss"]
    assert found[0].summary["eval_loss"] == one.summary["evaluations"]["odd"]["odd/loss"]
    assert one.summary["goals"][0]["value"] == one.summary["evaluations"]["odd"]["odd/loss"]
    assert one.summary["best"]["step"] == 5  # of equals, the one that was saved first

    logged = evals(tmp_path / "1")
    assert [(event["step"], event["set"]) for event in logged] == [(5, "val"), (5, "odd"), (10, "val"), (10, "odd")]
    assert [event.get("monitor", True) for event in logged[:2]] == [True, False]
    assert {"eval/odd/loss", "eval/odd/target"} <= scalars(logged[1]).keys()
    assert "eval odd" in write_report(tmp_path / "1").read_text()


def test_the_monitored_set_stops_the_run(pool: Pool, tmp_path: Path) -> None:
    values = BASE | {"evaluate.every": 1, "stop.patience": 2}
    for monitor, last in (("val", 10), ("odd", 3)):
        settings = values | {"run_dir": str(tmp_path / monitor), "evaluate.monitor": monitor}
        (trace,) = pool.run(fit, TwoSets(), settings, world=1)
        assert trace.summary["step"] == last


@pytest.mark.parametrize(("epochs", "expected"), [(1, [5, 10]), (0.5, [3, 5, 8, 10]), (2, [10])])
def test_epochs(epochs: float, expected: list[int]) -> None:
    schedule = EvaluationSchedule(EvaluateConfig(epochs=epochs), steps_per_epoch=5)
    assert [step for step in range(1, 11) if schedule.due_after(step)] == expected
    with pytest.raises(UserError, match="counts epochs, and the data is a stream"):
        EvaluationSchedule(EvaluateConfig(epochs=epochs), steps_per_epoch=None)


def test_a_share_of_an_epoch_that_is_no_float() -> None:
    schedule = EvaluationSchedule(EvaluateConfig(epochs=1.1), steps_per_epoch=10)
    assert [step for step in range(1, 40) if schedule.due_after(step)] == [11, 22, 33]


def test_minutes_count_on_rank_0_and_all_evaluate_together(pool: Pool, tmp_path: Path) -> None:
    values = BASE | {"run_dir": str(tmp_path), "evaluate.minutes": 1e-9, "steps": 6}
    traces = pool.run(fit, TwoSets(), values, world=2)
    # Rank 0 asks after a step, and the next control word carries it: one request is one evaluation.
    assert [event["step"] for event in evals(tmp_path)][::2] == [2, 4, 6]
    assert traces[0].summary["evaluations"] == traces[1].summary["evaluations"]


class OwnWays(Regression):
    """`all` is evaluated as the task says, `counts` in its own way."""

    def eval_data(self) -> Any:
        x, y = self.data()[:14]
        dataset = TensorDataset(x, y)
        return {"all": dataset, "counts": EvalData(dataset, self.count, lambda samples: samples, batch=5)}

    def count(self, model: nn.Module, batch: Any) -> Loss:
        assert isinstance(batch, list)  # of samples: its own collate
        return Loss(torch.tensor(float(len(batch))), 1, {"samples": torch.tensor(float(len(batch)))})


def test_a_set_may_have_its_own_loss_collate_and_batch(pool: Pool, tmp_path: Path) -> None:
    traces = pool.run(fit, OwnWays(), BASE | {"run_dir": str(tmp_path), "steps": 1}, world=2)
    for trace in traces:
        found = trace.summary["evaluations"]["counts"]
        assert found["counts/loss"] == pytest.approx(14 / 3)  # batches of 5, 5 and 4 samples
        assert trace.summary["eval_loss"] == trace.summary["evaluations"]["all"]["all/loss"]

    plain, own = evaluation_sets(OwnWays(), None)
    assert (plain.batch, own.batch, plain.metrics, own.metrics) == (None, 5, {}, {})
    with pytest.raises(UserError, match=r"EvalData\(batch=0\): a batch has a whole number of samples"):
        EvalData([1], batch=0)
    with pytest.raises(UserError, match=r"EvalData\(metrics=\.\.\.\) must give metrics by name; it gave a list"):
        evaluation_sets(Evaluated(EvalData([1], metrics=[2])), None)  # pyrefly: ignore[bad-argument-type]


class ByLoader(OwnWays):
    """The same sets, as scripts have them: the collate and the batch size are those of a DataLoader."""

    def eval_data(self) -> Any:
        dataset = super().eval_data()["all"]
        loader = DataLoader(dataset, batch_size=5, shuffle=True, collate_fn=list)
        return {"all": DataLoader(dataset), "counts": EvalData(loader, self.count)}


def test_a_loader_is_evaluated_on_as_its_parts_are(pool: Pool, tmp_path: Path) -> None:
    def results(task: Regression, world: int) -> Any:
        values = BASE | {"run_dir": str(tmp_path / f"{type(task).__name__}-{world}"), "steps": 1}
        return pool.run(fit, task, values, world=world)[0].summary["evaluations"]

    found, plain = results(ByLoader(), 1), results(OwnWays(), 1)
    assert found["counts"] == plain["counts"]
    assert found["all"]["all/loss"] == pytest.approx(plain["all"]["all/loss"])  # in batches of 1
    assert found == results(ByLoader(), 2)


class Evaluated(Regression):
    def __init__(self, data: Any):
        self.eval_data = lambda: data


def test_which_sets_there_are() -> None:
    assert evaluation_sets(Evaluated(None), None) == []
    assert [chosen.monitored for chosen in evaluation_sets(Evaluated({"a": [1], "b": [2]}), "b")] == [False, True]
    with pytest.raises(UserError, match=r"evaluate\.monitor=c is not known"):
        evaluation_sets(Evaluated({"a": [1]}), "c")
    with pytest.raises(UserError, match="the task's sets have no names"):
        evaluation_sets(Evaluated([1]), "a")
    with pytest.raises(UserError, match="an evaluation set is called 'a/b'"):
        evaluation_sets(Evaluated({"a/b": [1]}), None)
    with pytest.raises(UserError, match="the dataset 'b' to evaluate on has no samples"):
        check_data([], "b")

    task = Evaluated([1])
    task.eval_metrics = lambda: None  # pyrefly: ignore[bad-assignment]
    assert evaluation_sets(task, None)[0].metrics == {}
    task.eval_metrics = lambda: [torch.nn.Linear(1, 1)]
    with pytest.raises(UserError, match=r"eval_metrics\(\) must give metrics by name; it gave a list"):
        evaluation_sets(task, None)
