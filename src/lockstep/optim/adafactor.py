"""Adafactor: of a matrix of squared gradients only the means of its rows and of its columns are kept, no momentum.

After Shazeer and Stern, 2018, with the task's own learning rate. torch has one too, which does not take parameters that
are cut over ranks (2.13). Here every rank works on its rows, and two sums over ranks serve all parameters of a group.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lockstep.runtime.layout import laid_out, like, local, mesh_of

LEAST = 1e-30  # of a squared gradient
LONGEST = 1.0  # root mean square of an update, before the learning rate


class Adafactor(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0, decay: float = 0.8):
        """After t steps the means forget a share t ** -decay of what they know."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]
        assert closure is None
        for group in self.param_groups:
            by_grid: dict[Any, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_grid.setdefault(mesh_of(p), []).append(p)
            for some in by_grid.values():
                self._update(some, group)

    def _update(self, some: list[Tensor], group: dict[str, Any]) -> None:
        for p in some:
            if not self.state[p]:
                self.state[p].update(_first_state(p))
            self.state[p]["step"] += 1
        matrices = [p for p in some if p.dim() == 2]  # of others a rank has whole columns
        sums = _added([_squared(p).sum(-2, keepdim=True) for p in matrices], some[0])
        columns = {id(p): total / p.shape[0] for p, total in zip(matrices, sums, strict=True)}
        for p in some:
            self._remember(p, columns.get(id(p)), group)
        squares = _added([self._direction(p).square().sum() for p in some], some[0])
        for p, square in zip(some, squares, strict=True):
            length = (square / p.numel()).sqrt()
            step = self._direction(p).mul_(-float(group["lr"]) / (length / LONGEST).clamp(min=1.0))
            local(p).mul_(1 - float(group["lr"]) * group["weight_decay"]).add_(step)

    def _remember(self, p: Tensor, column: Tensor | None, group: dict[str, Any]) -> None:
        state, square = self.state[p], _squared(p)
        share = float(state["step"]) ** -group["decay"]
        if "square" in state:
            local(state["square"]).lerp_(square, share)
            return
        local(state["rows"]).lerp_(square.mean(-1), share)
        local(state["columns"]).lerp_(square.mean(-2, keepdim=True) if column is None else column, share)

    def _direction(self, p: Tensor) -> Tensor:
        """The gradient over its usual size. Computed twice rather than kept for all parameters."""
        state = self.state[p]
        if "square" in state:
            return local(p.grad) * local(state["square"]).rsqrt()  # pyrefly: ignore[bad-argument-type]
        columns = local(state["columns"])
        # The mean of the row means is the mean of the column means: every rank knows it.
        size = local(state["rows"]).unsqueeze(-1) * (columns / columns.mean(-1, keepdim=True))
        return local(p.grad) * size.rsqrt()  # pyrefly: ignore[bad-argument-type]


def _squared(p: Tensor) -> Tensor:
    return local(p.grad).square().add_(LEAST)  # pyrefly: ignore[bad-argument-type]


def _first_state(p: Tensor) -> dict[str, Any]:
    here = local(p)
    state: dict[str, Any] = {"step": torch.tensor(0.0)}
    if p.dim() < 2 or min(p.shape[-2:]) == 1:
        zeros = torch.zeros_like(here)
        return state | {"square": like(zeros, p) if isinstance(p, DTensor) else zeros}
    rows, columns = here.new_zeros(here.shape[:-1]), here.new_zeros((*here.shape[:-2], 1, here.shape[-1]))
    if isinstance(p, DTensor):
        rows = laid_out(rows, p, p.shape[:-1])
        columns = laid_out(columns, p, (*p.shape[:-2], 1, p.shape[-1]), whole=p.dim() == 2)
    return state | {"rows": rows, "columns": columns}


def _added(parts: list[Tensor], model: Tensor) -> list[Tensor]:
    """Each summed over the ranks that `model` is cut over, all in one exchange."""
    if not parts or not isinstance(model, DTensor):
        return parts
    flat = torch.cat([part.flatten() for part in parts])
    for axis, placement in enumerate(model.placements):
        if placement != Replicate():
            dist.all_reduce(flat, group=model.device_mesh.get_group(axis))
    sizes = [math.prod(part.shape) for part in parts]
    return [piece.view(part.shape) for piece, part in zip(flat.split(sizes), parts, strict=True)]
