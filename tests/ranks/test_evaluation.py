"""Evaluation counts every sample once and gives the same float at any world size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.data.samplers import Sampled, SequentialSampler
from lockstep.engine.evaluation.evaluator import EvaluationSet
from lockstep.engine.own_loop import OwnRun
from lockstep.runtime.world import World
from lockstep.task import Loss, Task
from pool import Pool
from ranks.support import Rows, assert_user_errors, fit, open_watched, train_by_hand

WORLDS = (1, 2, 3, 4)


class Scored(Task):
    """A classifier with ragged sample weights, and metrics with and without a weight of their own."""

    def __init__(self, count: int, dtype: torch.dtype = torch.float32):
        self.dtype = dtype
        g = torch.Generator().manual_seed(count)
        labels, weights = torch.randint(0, 3, (count,), generator=g), torch.randint(0, 4, (count,), generator=g)
        inputs = torch.randn(count, 5, generator=g, dtype=dtype)
        self.held_out = Rows([torch.arange(count), inputs, labels, weights])
        self.training = Rows([tensor[: min(8, count)] for tensor in self.held_out.tensors])
        self.seen: list[int] = []  # ids that this rank evaluated
        self.in_training_mode: set[bool] = set()

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)).to(self.dtype)

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.0)  # the weights stay those that the reference has

    def data(self) -> Any:
        return self.training

    def eval_data(self) -> Any:
        return self.held_out

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        _, x, label, weight = batch
        logits = model(x)
        each = nn.functional.cross_entropy(logits, label, reduction="none")
        right = (logits.argmax(-1) == label).sum()
        return Loss((weight * each).sum(), weight.sum(), {"worst": each.sum(), "accuracy": (right, len(label))})

    def eval_loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        self.seen += batch[0].tolist()
        self.in_training_mode.add(model.training)
        return self.loss(model, batch)


@dataclass
class Outcome:
    loss: float
    metrics: dict[str, float]
    samples: int
    weight: float
    seen: list[int]
    modes: set[bool]
    training_after: bool
    weights: dict[str, Tensor]


def evaluate(world: World, store: Any, task: Scored, values: dict[str, Any]) -> Outcome:
    with open_watched(world, store, values) as builder:
        builder.setup_model(task.model(), task.optimizer)
        run = builder.setup_run(task.data(), task.collate)
        (found,) = run.evaluate([EvaluationSet(task.eval_data(), task.eval_loss, task.collate)])
        weights = {name: p.detach().clone() for name, p in run.driver.model.named_parameters()}
        mode = run.driver.model.training
        return Outcome(
            found.loss, found.metrics, found.samples, found.weight, task.seen, task.in_training_mode, mode, weights
        )


def reference(task: Scored, weights: dict[str, Tensor]) -> tuple[float, dict[str, float]]:
    """One process, one batch, float64."""
    model = task.model().double().eval()
    model.load_state_dict(weights)
    ids, x, label, weight = task.held_out.tensors
    with torch.no_grad():
        loss = task.loss(model, [ids, x.double(), label, weight])
    total = float(loss.weight)
    worst, (right, count) = loss.metrics["worst"], loss.metrics["accuracy"]
    return float(loss.total) / total, {"worst": float(worst) / total, "accuracy": float(right) / count}


def values(**more: Any) -> dict[str, Any]:
    return {"global_batch": 8, "steps": 1} | more


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # sums of float32 are exact in Python's floats
@pytest.mark.parametrize("count", [101, 2])
@pytest.mark.parametrize(
    "settings",
    [values(micro_batch=2, **{"evaluate.batch": 7}), values(micro_batch=2)],
    ids=["evaluate.batch", "micro_batch"],
)
def test_the_same_float_at_any_world_size(pool: Pool, count: int, settings: dict[str, Any], dtype: torch.dtype) -> None:
    task = Scored(count, dtype)
    by_world = {size: pool.run(evaluate, task, settings, world=size) for size in WORLDS}
    one = by_world[1][0]
    loss, metrics = reference(task, one.weights)
    assert one.loss == pytest.approx(loss, rel=1e-6)
    assert one.metrics == pytest.approx(metrics, rel=1e-6)
    for size, outcomes in by_world.items():
        assert sorted(i for outcome in outcomes for i in outcome.seen) == list(range(count)), f"world {size}"
        for outcome in outcomes:
            assert (outcome.loss, outcome.metrics) == (one.loss, one.metrics), f"world {size}"  # to the last bit
            assert outcome.samples == count
            assert outcome.weight == int(task.held_out.tensors[-1].sum())
            assert outcome.training_after
            assert not any(outcome.modes), "the model was evaluated in training mode"


def test_a_derived_batch_is_equal_to_rounding(pool: Pool) -> None:
    """Without evaluate.batch and micro_batch the batch follows from the number of ranks."""
    task = Scored(101)
    loss, _ = reference(task, pool.run(evaluate, task, values(), world=1)[0].weights)
    for size in WORLDS:
        for outcome in pool.run(evaluate, task, values(), world=size):
            assert outcome.loss == pytest.approx(loss, rel=1e-6)
            assert outcome.samples == 101


def test_worker_processes_change_nothing(pool: Pool) -> None:
    task, settings = Scored(101), values(micro_batch=2, **{"evaluate.batch": 7})
    one = pool.run(evaluate, task, settings, world=1)[0]
    for outcome in pool.run(evaluate, task, settings | {"data.workers": 2}, world=2):
        assert (outcome.loss, outcome.metrics, outcome.samples) == (one.loss, one.metrics, 101)


def own_evaluate(world: World, store: Any, task: Scored, settings: dict[str, Any]) -> dict[str, float]:
    with open_watched(world, store, settings) as builder:
        own = OwnRun(builder)
        model = task.model()
        own.setup(model, task.optimizer(model))
        for step in own.steps(task.data(), task.collate):
            for batch in step:
                loss = task.loss(builder.driver.model, batch)
                step.backward(loss.total, loss.weight)
            step.apply()
            return own.evaluate(task.eval_data(), task.eval_loss)
        raise AssertionError("no step")


def test_fit_and_the_own_loop_agree(pool: Pool) -> None:
    task, settings = Scored(101), values(micro_batch=2, **{"evaluate.batch": 7})
    expected = pool.run(evaluate, task, settings, world=1)[0]
    for size in (1, 3):
        for trace in pool.run(fit, task, settings, world=size):
            assert trace.summary["eval_loss"] == expected.loss
            assert trace.summary["eval_metrics"] == expected.metrics
        for found in pool.run(own_evaluate, task, settings, world=size):
            assert found == {"loss": expected.loss, **expected.metrics}


def evaluate_on_rank_0(world: World, store: Any, task: Scored, settings: dict[str, Any]) -> None:
    with open_watched(world, store, settings) as builder:
        own = OwnRun(builder)
        train_by_hand(own, task)
        if own.is_main:
            own.evaluate(task.eval_data(), task.eval_loss)
        own.close()


def test_an_evaluation_of_one_rank_after_the_loop_is_named(pool: Pool) -> None:
    errors = pool.errors(evaluate_on_rank_0, Scored(9), values(micro_batch=2), world=2)
    assert len(errors) == 2
    assert_user_errors(errors, "run.evaluate(...) was called on rank 0, and not on the others")


class Normalised(Scored):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def buffers_around_evaluation(world: World, store: Any, task: Scored) -> tuple[Tensor, Tensor]:
    with open_watched(world, store, values(micro_batch=4)) as builder:
        builder.setup_model(task.model(), task.optimizer)
        run = builder.setup_run(task.data(), task.collate)
        for batches in run.step_batches():
            run.end_step(batches, run.stepper.step(batches, task.loss))
        mean = run.driver.model[1].running_mean
        before = mean.clone()
        run.evaluate([EvaluationSet(task.eval_data(), task.eval_loss, task.collate)])
        return before, mean.clone()


def test_running_statistics_are_made_equal_first(pool: Pool) -> None:
    (first, first_after), (second, second_after) = pool.run(buffers_around_evaluation, Normalised(20), world=2)
    assert not torch.equal(first, second), "the ranks saw different samples"
    assert not torch.equal(first_after, first), "they are those of all samples, see test_batchnorm.py"
    assert torch.equal(second_after, first_after)


@pytest.mark.parametrize("epoch", [3, 12])  # a shorter epoch than the dataset, and a longer one
def test_a_sampler_is_for_training_only(pool: Pool, epoch: int) -> None:
    task = Scored(count=5)
    task.held_out = Sampled(task.held_out, SequentialSampler(epoch))
    (found,) = pool.run(evaluate, task, values(), world=1)
    assert (found.seen, found.samples) == ([0, 1, 2, 3, 4], 5)


class Looking(Scored):
    """Calls the model after every step, as well."""

    def after_step(self, run: Any, result: Any) -> None:
        with torch.no_grad():
            run.model(self.held_out.tensors[1])


@pytest.mark.parametrize(("task", "every"), [(Scored, 2), (Looking, 1000)])
def test_a_checkpoint_may_follow_forwards_without_a_backward(task: type[Scored], every: int, pool: Pool) -> None:
    """Under fsdp-grads they leave the weights gathered; what is saved are the shards."""
    values = {"strategy": "fsdp-grads", "blocks": ["Linear"], "steps": 4, "global_batch": 4, "checkpoint.every": 2}
    traces = pool.run(fit, task(8), values | {"evaluate.every": every}, world=2)
    assert [len(trace.steps) for trace in traces] == [4, 4]
