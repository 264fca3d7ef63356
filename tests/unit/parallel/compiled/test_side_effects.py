"""What must not be compiled is found in the graph of a loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.parallel.compiled.side_effects import changed_inputs


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda task, model, batch: task.center.mul_(0.9), ["self.center"]),
        (lambda task, model, batch: task.center[0].copy_(batch.sum()), ["self.center"]),
        # What returns its argument, if nothing is to be done.
        (lambda task, model, batch: task.center.to(batch.device).mul_(0.9), ["self.center"]),
        (lambda task, model, batch: task.center.float().contiguous().mul_(0.9), ["self.center"]),
        (lambda task, model, batch: task.center.data.mul_(0.9), ["self.center"]),
        (lambda task, model, batch: torch._foreach_mul_([task.center], 0.9), ["self.center"]),
        (lambda task, model, batch: F.batch_norm(batch, task.center, batch[0], training=True), ["self.center"]),
        (lambda task, model, batch: F.batch_norm(batch, task.center, batch[0]), []),
        (lambda task, model, batch: torch.add(task.center, 1, out=task.center), ["self.center"]),
        (
            lambda task, model, batch: checkpoint(lambda x: task.center.mul_(0.9) * x, batch, use_reentrant=False),
            ["self.center"],
        ),
        (lambda task, model, batch: checkpoint(torch.tanh, batch, use_reentrant=False), []),
        (lambda task, model, batch: batch.float().add_(1), []),
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
            self.center = torch.ones(2).mul_(2)  # changed before: only what the graph does counts

        def loss(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
            change(self, model, batch)
            return model(batch).sum()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.extend(changed_inputs(graph, ("model", "batch")))
        return graph

    model = nn.Linear(2, 1)
    model.register_buffer("mean", torch.zeros(()))
    torch._dynamo.reset()
    torch.compile(Task().loss, fullgraph=True, backend=backend)(model, torch.ones(3, 2))
    assert found == named
