"""An isolated call leaves the batch and the model alone, and two of them can be compared."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from lockstep.parallel.calls.state import StateSnapshot
from lockstep.parallel.compiled.comparison import CallResult, difference, run_isolated
from lockstep.task import Loss


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


def test_a_batch_of_a_class_that_torch_does_not_know_is_copied() -> None:
    model, batch = nn.Linear(2, 1), Batch(torch.full((3, 2), 255.0))

    def loss(batch: Batch) -> Loss:
        return Loss(model(batch.x.div_(255)).sum(), 3)

    run_isolated(loss, ((batch,), {}), list(model.parameters()))
    assert batch.x.eq(255).all()


def test_another_weight_is_a_difference() -> None:
    model = nn.Linear(2, 1)

    def run(weight: float) -> CallResult:
        arguments = (torch.ones(3, 2),), {}
        return run_isolated(lambda x: Loss(model(x).sum(), weight), arguments, list(model.parameters()))

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
