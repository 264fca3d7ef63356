"""A trial leaves the batch alone, and sees what must not be compiled."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.parallel.call_state import StateSnapshot
from lockstep.parallel.compiled import targets
from lockstep.parallel.compiled.compiler import Compiler
from lockstep.parallel.compiled.shapes import SizesSeen
from lockstep.parallel.compiled.trial import Outcome, Trial, difference
from lockstep.task import Loss


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


def test_a_batch_of_a_class_that_torch_does_not_know_is_copied() -> None:
    model, batch = nn.Linear(2, 1), Batch(torch.full((3, 2), 255.0))

    def loss(batch: Batch) -> Loss:
        return Loss(model(batch.x.div_(255)).sum(), 3)

    Trial(list(model.parameters()), ((batch,), {})).run(loss)
    assert batch.x.eq(255).all()


def test_another_weight_is_a_difference() -> None:
    model = nn.Linear(2, 1)
    trial = Trial(list(model.parameters()), ((torch.ones(3, 2),), {}))
    outcomes: list[Outcome] = [trial.run(lambda x, w=weight: Loss(model(x).sum(), w)) for weight in (8, 8.0, 800)]
    assert difference(outcomes[0], outcomes[1]) == 0.0
    assert difference(outcomes[0], outcomes[2]) > 1


def test_a_snapshot_writes_only_what_has_changed() -> None:
    model = nn.BatchNorm1d(2)
    before = model.running_mean._version, model.running_var._version
    with StateSnapshot(model):
        model.running_mean.add_(1)
    assert model.running_mean.eq(0).all()
    assert model.running_var._version == before[1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda task, model, batch: task.center.mul_(0.9), ["self.center"]),
        (lambda task, model, batch: task.center[0].copy_(batch.sum()), ["self.center"]),
        (lambda task, model, batch: batch.add_(1), []),
        (lambda task, model, batch: model.mean.add_(1), []),
        (lambda task, model, batch: (batch * 2).add_(1), []),
        (lambda task, model, batch: (task.center > 0) & (batch.sum() > 0), []),
    ],
)
def test_tensors_that_a_graph_changes(change: Any, named: list[str]) -> None:
    found: list[str] = []

    class Task:
        def __init__(self) -> None:
            self.center = torch.zeros(2)

        def loss(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
            change(self, model, batch)
            return model(batch).sum()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.extend(targets.changed_inputs(graph, ("model", "batch")))
        return graph

    model = nn.Linear(2, 1)
    model.register_buffer("mean", torch.zeros(()))
    torch.compile(Task().loss, fullgraph=True, backend=backend)(model, torch.ones(3, 2))
    assert found == named


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_ranks_with_irregular_batches_agree(order: tuple[int, int]) -> None:
    """What a rank decides by does not depend on what it has seen first."""
    seen = [SizesSeen(), SizesSeen()]
    seen[order[0]].add([(4, 6)])
    seen[order[0]].add([(4, 8)])
    seen[order[1]].add([(4, 6), (4,)])
    gathered = [[each.sizes, each.irregular] for each in seen]

    agreed = []
    for sizes in seen:
        compiler = Compiler.__new__(Compiler)
        compiler.sizes = sizes
        compiler.runtime = SimpleNamespace(collectives=SimpleNamespace(gather_json=lambda mine: gathered))  # type: ignore
        compiler._agree_on_sizes()
        agreed.append((sizes.sizes, sizes.irregular, compiler._varying))

    assert agreed[0] == agreed[1]
    assert agreed[0][1:] == (True, frozenset())
