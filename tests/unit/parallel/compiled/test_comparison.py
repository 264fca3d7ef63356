"""An isolated call leaves the batch and the model alone, and two of them can be compared."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lockstep.parallel.calls.state import StateSnapshot
from lockstep.parallel.compiled.comparison import (
    CallResult,
    buffer_difference,
    difference,
    missing_effects,
    run_isolated,
)
from lockstep.task import Loss


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


def test_a_batch_of_a_class_that_torch_does_not_know_is_copied() -> None:
    model, batch = nn.Linear(2, 1), Batch(torch.full((3, 2), 255.0))

    def loss(batch: Batch) -> Loss:
        return Loss(model(batch.x.div_(255)).sum(), 3)

    run_isolated(loss, ((batch,), {}), list(model.parameters()), StateSnapshot(model))
    assert batch.x.eq(255).all()


def test_another_weight_is_a_difference() -> None:
    model = nn.Linear(2, 1)

    def run(weight: float) -> CallResult:
        arguments = (torch.ones(3, 2),), {}
        parameters = list(model.parameters())
        return run_isolated(lambda x: Loss(model(x).sum(), weight), arguments, parameters, StateSnapshot(model))

    results = [run(weight) for weight in (8, 8.0, 800)]
    assert difference(results[0], results[1]) == 0.0
    assert difference(results[0], results[2]) > 1


def test_a_snapshot_writes_only_what_has_changed() -> None:
    model = nn.BatchNorm1d(2)
    before = model.running_mean._version, model.running_var._version
    with StateSnapshot(model):
        model.running_mean.add_(1)
    assert model.running_mean.eq(0).all()
    assert model.running_var._version == before[1]


class Leaving(nn.Linear):
    """Leaves a part of its loss in an attribute, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mask", torch.full((2,), -torch.inf))
        self.aux: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, leaves: float = 1.0, counts: float = 1.0) -> torch.Tensor:
        self.seen += counts
        y = super().forward(x)
        if leaves:
            self.aux = leaves * y.square().sum()
        return y


def left_by(model: nn.Module, call: Any, **options: float) -> CallResult:
    with StateSnapshot(model) as snapshot:
        return run_isolated(call, ((torch.ones(3, 2),), options), list(model.parameters()), snapshot)


def test_what_a_call_leaves_on_the_model_is_compared() -> None:
    model = Leaving()
    expected = left_by(model, model)
    assert missing_effects(expected, left_by(model, model)) == []
    assert difference(expected, left_by(model, model)) == buffer_difference(expected, left_by(model, model)) == 0.0
    assert missing_effects(expected, left_by(model, model, leaves=0.0)) == ["Leaving.aux"]
    assert difference(expected, left_by(model, model, leaves=2.0)) > 0.1
    assert buffer_difference(expected, left_by(model, model, counts=2.0)) == 1.0


@dataclasses.dataclass
class Output:
    y: torch.Tensor


def test_the_tensors_of_an_object_that_torch_does_not_know_are_compared() -> None:
    model = nn.Linear(2, 1)
    once, twice = (left_by(model, lambda x, factor=factor: Output(factor * model(x))) for factor in (1, 2))
    assert difference(once, twice) > 0.5


class Recomputing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Conversions(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_its_backward_leaves_no_converted_weights_behind() -> None:
    """The forward of the step would not convert them again, and a selective recomputation would miss that."""
    model, x = Recomputing(2, 1), torch.ones(3, 2)

    def conversions() -> int:
        with Conversions() as found:
            model(x)
        return found.count

    with torch.autocast("cpu", torch.bfloat16):
        expected = conversions()
        torch.clear_autocast_cache()
        left_by(model, model)
        assert conversions() == expected == 3
