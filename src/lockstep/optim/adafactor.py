"""Adafactor: keeps only the row and column means of a matrix of squared gradients, and no momentum.

After Shazeer and Stern, 2018, but with the task's own learning rate. Every rank updates its own rows. Each group needs
two all-reduces for all its parameters together.

We do not use torch.optim.Adafactor (compared in 2.13) for three reasons. It does not take sharded parameters: on a
DTensor it raises "in-place operations that require placement changes are not supported". It reads two norms per
parameter on the host in every step. And it multiplies the rate by the norm of the parameter, and limits it by
1 / sqrt(step), so that `lr.peak` would mean something else here than with every other optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lockstep.runtime.shards import by_mesh, dtensor_by_rows, dtensor_like, to_local

# Epsilon 1 of the paper, added to a squared gradient because the update divides by its root.
EPS1 = 1e-30
# Threshold d of the paper's update clipping: the largest root mean square of an update, before the learning rate.
CLIP_THRESHOLD = 1.0


class Adafactor(torch.optim.Optimizer):
    """Adafactor for plain parameters and for parameters that FSDP shards by rows.

    It keeps the means of rows and columns in place of all squared gradients. A mean over rows that are on several ranks
    needs a collective, so `step` is one then.
    """

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0, decay: float = 0.8):
        """In step t, the moving means take the new squared gradient with weight t ** -decay."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]
        """Update all parameters that have a gradient. Collective over the mesh of sharded parameters."""
        assert closure is None
        for group in self.param_groups:
            for parameters in by_mesh(p for p in group["params"] if p.grad is not None):
                self._update(parameters, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update parameters that share one mesh, or have none.

        A squared gradient is estimated as row mean x column mean / mean of all elements.
        """
        for p in parameters:
            if not self.state[p]:
                self.state[p].update(_first_state(p))

            self.state[p]["step"] += 1

        # A column mean of a matrix runs over rows on several ranks. A tensor with more dimensions is sharded along its
        # first dimension, so this rank has full columns of it.
        matrices = [p for p in parameters if p.dim() == 2]
        sums = _all_reduced([_squared(p).sum(-2, keepdim=True) for p in matrices], parameters[0])
        columns = {id(p): total / p.shape[0] for p, total in zip(matrices, sums, strict=True)}
        for p in parameters:
            self._update_means(p, columns.get(id(p)), group)

        # The update is clipped by the root mean square over the full parameter, hence a second all-reduce.
        squares = _all_reduced([self._direction(p).square().sum() for p in parameters], parameters[0])
        for p, square in zip(parameters, squares, strict=True):
            excess = ((square / p.numel()).sqrt() / CLIP_THRESHOLD).clamp(min=1.0)
            step = self._direction(p).mul_(-float(group["lr"]) / excess)
            to_local(p).mul_(1 - float(group["lr"]) * group["weight_decay"]).add_(step)

    def _update_means(self, p: Tensor, column: Tensor | None, group: dict[str, Any]) -> None:
        """Move the means towards the squared gradient.

        column: (1, columns), the means over the rows of all ranks; None if this rank has full columns
        """
        state = self.state[p]
        square = _squared(p)
        weight = float(state["step"]) ** -group["decay"]
        if "square" in state:
            to_local(state["square"]).lerp_(square, weight)
            return

        to_local(state["rows"]).lerp_(square.mean(-1), weight)
        to_local(state["columns"]).lerp_(square.mean(-2, keepdim=True) if column is None else column, weight)

    def _direction(self, p: Tensor) -> Tensor:
        """Return the gradient of this rank's rows, divided by the estimated root mean square of each element.

        `_update` computes it twice, which needs less memory than storing it for all parameters.
        """
        state = self.state[p]
        if "square" in state:
            square = to_local(state["square"])
        else:
            # The mean of all elements is the mean of the column means, which every rank has.
            columns = to_local(state["columns"])
            square = to_local(state["rows"]).unsqueeze(-1) * (columns / columns.mean(-1, keepdim=True))

        return to_local(p.grad) * square.rsqrt()  # pyrefly: ignore[bad-argument-type]


def _squared(p: Tensor) -> Tensor:
    """Return the squared gradient of this rank's rows. It is always above 0."""
    return to_local(p.grad).square().add_(EPS1)  # pyrefly: ignore[bad-argument-type]


def _first_state(p: Tensor) -> dict[str, Any]:
    """Return the state before the first step: `square` for vectors, `rows` and `columns` for everything else."""
    shard = to_local(p)
    step = torch.tensor(0.0)
    if p.dim() < 2 or min(p.shape[-2:]) == 1:
        return {"step": step, "square": dtensor_like(torch.zeros_like(shard), p)}

    # Row means are sharded like the rows. Column means of a matrix are replicated.
    rows = shard.new_zeros(shard.shape[:-1])
    columns = shard.new_zeros((*shard.shape[:-2], 1, shard.shape[-1]))
    return {
        "step": step,
        "rows": dtensor_by_rows(rows, p, p.shape[:-1]),
        "columns": dtensor_by_rows(columns, p, (*p.shape[:-2], 1, p.shape[-1]), replicate=p.dim() == 2),
    }


def _all_reduced(sums: list[Tensor], parameter: Tensor) -> list[Tensor]:
    """Return each tensor summed over the ranks that shard `parameter`, with one all-reduce for all of them."""
    if not sums or not isinstance(parameter, DTensor):
        return sums

    flat = torch.cat([tensor.flatten() for tensor in sums])
    for axis, placement in enumerate(parameter.placements):
        # Along a replicated axis every rank already has the same sums.
        if placement != Replicate():
            dist.all_reduce(flat, group=parameter.device_mesh.get_group(axis))

    totals = flat.split([tensor.numel() for tensor in sums])
    return [total.view(tensor.shape) for total, tensor in zip(totals, sums, strict=True)]
