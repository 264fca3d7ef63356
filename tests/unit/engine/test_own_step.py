"""Custom loops that go wrong, or over the batches of a step more than once."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.engine.outcomes.outcome import MANY_EMPTY
from lockstep.engine.own_step import OwnStep
from lockstep.errors import UserError
from lockstep.files.jsonl import read_jsonl
from lockstep.optim.weight_average import WeightAverage
from lockstep.task import MicroBatch

DATA = TensorDataset(torch.arange(16.0).reshape(16, 1))
SETTINGS: dict[str, Any] = {"global_batch": 8, "micro_batch": 4, "steps": 2, "log": {"progress": "off", "every": 1}}

Body = Callable[[OwnStep, nn.Module], None]


def run_loop(folder: Path, body: Body, passes: int = 1, callbacks: Any = (), **settings: Any) -> dict[str, Any]:
    """Return the summary of a custom loop with this body."""
    with lockstep.start(run_dir=folder, **SETTINGS | settings) as run:
        for callback in callbacks:
            run.add_callback(callback)

        model, _ = run.setup(plain := nn.Linear(1, 1), torch.optim.SGD(plain.parameters(), lr=0.01))
        for step in run.steps(DATA, passes=passes):
            body(step, model)

    return json.loads((folder / "summary.json").read_text())


def one_pass(step: OwnStep, model: nn.Module, factor: float = 1.0) -> None:
    for (x,) in step:
        step.backward((model(x) * factor).sum(), weight=len(x))


class Fails(torch.autograd.Function):
    """Its backward raises the first time."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Fails.calls += 1
        if Fails.calls == 1:
            raise torch.OutOfMemoryError("too large")
        return gradients[0]


def backward_that_fails(step: OwnStep, model: nn.Module, x: Tensor) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        step.backward(Fails.apply(model(x)).sum(), weight=len(x))


def repeats(step: OwnStep, model: nn.Module) -> None:
    for (x,) in step:
        backward_that_fails(step, model, x)
        step.backward(model(x).sum(), weight=len(x))


def goes_on(step: OwnStep, model: nn.Module) -> None:
    for (x,) in step:
        backward_that_fails(step, model, x)


def applies(step: OwnStep, model: nn.Module) -> None:
    for (x,) in step:
        backward_that_fails(step, model, x)
        step.apply()


@pytest.mark.parametrize("body", [repeats, goes_on, applies])
def test_a_backward_that_has_raised_ends_its_step(body: Body, tmp_path: Path) -> None:
    """Its loss would count twice, and a part of its gradients."""
    Fails.calls = 0
    with pytest.raises(UserError, match="a backward of step 1 has raised, and the step cannot go on") as raised:
        run_loop(tmp_path / "run", body)
    assert "set a smaller micro_batch" in str(raised.value.fix)


def test_a_loss_that_is_refused_is_not_counted(tmp_path: Path) -> None:
    counts = []

    def body(step: OwnStep, model: nn.Module) -> None:
        for (x,) in step:
            with pytest.raises(UserError, match="must be one number"):
                step.backward(model(x).sum(), weight=len(x), accuracy=torch.ones(2))
            step.backward(model(x).sum(), weight=len(x))
        counts.append((len(step._progress.losses), len(step._progress.micro_batches)))
        step.apply()

    run_loop(tmp_path / "run", body)
    assert counts == [(2, 2), (2, 2)]


# ---- the calls of a step in a wrong order ----


def goes_over_again(step: OwnStep, model: nn.Module) -> None:
    one_pass(step, model)
    one_pass(step, model)
    step.apply()


def no_batch(step: OwnStep, model: nn.Module) -> None:
    step.backward(model(torch.ones(4, 1)).sum(), weight=4)


def after_apply(step: OwnStep, model: nn.Module) -> None:
    one_pass(step, model)
    step.apply()
    no_batch(step, model)


def twice(step: OwnStep, model: nn.Module) -> None:
    one_pass(step, model)
    no_batch(step, model)


OUTSIDE = "step.backward was called outside of the batches of step 1"


@pytest.mark.parametrize(
    ("body", "passes", "problem"),
    [
        (goes_over_again, 1, r"went over the batches of step 1 again, before step\.apply\(\)"),
        (goes_over_again, 2, r"went over the batches of step 1 again, before step\.apply\(\)"),
        (no_batch, 1, OUTSIDE),
        (after_apply, 1, OUTSIDE),
        (after_apply, 2, OUTSIDE),
        (twice, 1, "step.backward was called twice for batch 1 of step 1"),
    ],
)
def test_calls_in_a_wrong_order_are_named(body: Body, passes: int, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=problem):
        run_loop(tmp_path / "run", body, passes)


@pytest.mark.parametrize("passes", [1, 2])
def test_batches_may_be_taken_one_by_one(passes: int, tmp_path: Path) -> None:
    taken = []

    def body(step: OwnStep, model: nn.Module) -> None:
        for _ in range(passes):
            for _ in range(2):
                (x,) = next(iter(step))
                taken.append(x.sum().item())
                step.backward(model(x).sum(), weight=len(x))
            step.apply()

    assert run_loop(tmp_path / "run", body, passes)["applied"] == 2
    assert taken[:2] * (passes - 1) == taken[2 : 2 * passes]


# ---- several passes ----


def test_a_step_with_several_skipped_passes_counts_once(tmp_path: Path) -> None:
    def body(step: OwnStep, model: nn.Module) -> None:
        for _ in range(2):
            one_pass(step, model, math.nan)
            step.apply()

    with pytest.raises(UserError) as raised:
        run_loop(tmp_path / "run", body, passes=2, nonfinite={"max_in_a_row": 3})
    assert str(raised.value).startswith("none of the 2 steps was applied: 2 were skipped for the reasons above\n")
    assert [line["skipped"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert len([e for e in read_jsonl(tmp_path / "run" / "events.jsonl") if e["event"] == "skip"]) == 4


class Reports:
    """A callback that keeps what each step reports."""

    def __init__(self) -> None:
        self.applied: list[bool] = []
        self.steps_applied: list[int] = []

    def after_step(self, run: Any, result: Any) -> None:
        assert result.skip_reason is None or not result.applied
        self.applied.append(result.applied)
        self.steps_applied.append(run.steps_applied)


def stops_early(factor: float, weight: int, results: list[Any]) -> Body:
    """A loop of two passes, whose second is applied only in the first of the steps."""

    def body(step: OwnStep, model: nn.Module) -> None:
        one_pass(step, model)
        results.append(step.apply())
        for (x,) in step:
            spoiled = step.index > 0
            step.backward((model(x) * (factor if spoiled else 1)).sum(), weight=weight if spoiled else len(x))
        results.append(step.apply())

    return body


@pytest.mark.parametrize(("factor", "weight"), [(1.0, 0), (math.nan, 4)])
def test_a_step_is_applied_if_any_of_its_passes_is(factor: float, weight: int, tmp_path: Path) -> None:
    """As in PPO that stops early: the schedule and the averages move, and the run has a result."""
    results: list[Any] = []
    reports = Reports()
    settings = {"steps": 4, "lr": {"warmup": 4, "schedule": "constant"}, "nonfinite": {"max_in_a_row": 9}}
    summary = run_loop(tmp_path / "run", stops_early(factor, weight, results), 2, [reports], **settings)

    assert (summary["applied"], reports.applied, reports.steps_applied) == (4, [True] * 4, [1, 2, 3, 4])
    assert [result.applied for result in results] == [True, True] + 3 * [True, False]
    assert (tmp_path / "run" / "model.safetensors").exists()

    rates = [line["lr"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert rates == sorted(set(rates)), "the warmup stands still"


def test_the_average_moves_if_any_pass_was_applied(tmp_path: Path) -> None:
    stepped: list[bool] = []
    update = WeightAverage.update
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightAverage, "update", lambda self, skip: (stepped.append(not skip), update(self, skip)))
        run_loop(tmp_path / "run", stops_early(1.0, 0, []), 2, steps=3, ema={"decay": 0.5})
    assert stepped == [True, True, True]


def test_empty_passes_of_steps_that_learn_cause_no_warning(tmp_path: Path) -> None:
    def body(step: OwnStep, model: nn.Module) -> None:
        one_pass(step, model)
        step.apply()
        for _ in range(MANY_EMPTY):
            for (x,) in step:
                step.backward(model(x).sum(), weight=0)
            step.apply()

    run_loop(tmp_path / "run", body, MANY_EMPTY + 1)
    warnings = [e for e in read_jsonl(tmp_path / "run" / "events.jsonl") if e["event"] == "warning"]
    assert not [event for event in warnings if "weight 0" in event["reason"]]


class Scales:
    """A callback that replaces the data of each batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def before_batch(self, run: Any, micro: MicroBatch) -> None:
        (x,) = micro.data
        micro.data = (x * 2,)
        self.seen.append(x.sum().item())


def test_hooks_are_called_before_each_batch_of_every_pass(tmp_path: Path) -> None:
    """They get the data of the source, not what they have made of it in the previous pass."""
    given: list[float] = []

    def body(step: OwnStep, model: nn.Module) -> None:
        for _ in range(3):
            for (x,) in step:
                given.append(x.sum().item())
                step.backward(model(x).sum(), weight=len(x))
            step.apply()

    scales = Scales()
    run_loop(tmp_path / "run", body, passes=3, callbacks=[scales])
    assert len(scales.seen) == 2 * 2 * 3
    assert given == [2 * total for total in scales.seen]
    assert scales.seen[:2] == scales.seen[2:4] == scales.seen[4:6]


def test_the_batches_of_a_step_are_kept_for_its_passes_only(tmp_path: Path) -> None:
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def body(step: OwnStep, model: nn.Module) -> None:
        for _ in range(2):
            for batch in step:
                seen.append(weakref.ref(batch[0]))
                step.backward(model(batch[0]).sum(), weight=4)
            del batch
            step.apply()
            alive.append(len({id(ref()) for ref in seen if ref() is not None}))

    run_loop(tmp_path / "run", body, passes=2)
    assert alive == [2, 0, 2, 0]


@pytest.mark.parametrize("factor", [1.0, math.nan])
def test_a_step_of_weight_0_has_the_gradient_0(factor: float, tmp_path: Path) -> None:
    norms = []

    def body(step: OwnStep, model: nn.Module) -> None:
        for (x,) in step:
            step.backward((model(x) * (factor if step.index else 1)).sum(), weight=0 if step.index else len(x))
        result = step.apply()
        assert result is not None
        norms.append(result.grad_norm)

    assert run_loop(tmp_path / "run", body)["applied"] == 1
    assert norms[0] > 0 == norms[1]
    assert [line["grad_norm"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == norms
