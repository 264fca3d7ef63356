"""A vector for every puzzle id, in a table that no gradient passes through as a whole, and its optimizer.

A step touches a few rows of a table that may have a million. So the rows in use are copied out, as leaves, and only
their gradients travel: (slot, id, row), gathered from all ranks, added per id, and then the sign of the sum is taken,
once. Taking the sign first, on each rank, would move a row twice that two ranks use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.recipes.hrm.exchange import gather_rows


class SparseEmbedding(nn.Module):
    def __init__(self, ids: int, width: int):
        super().__init__()
        self.register_buffer("table", torch.zeros(ids, width))

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of `ids`, one for each, as a leaf: its `.grad` is what the optimizer asks for."""
        return self.table[ids.long()].requires_grad_(torch.is_grad_enabled())


class CastedSparseEmbeddingSignSGD_Distributed(torch.optim.Optimizer):
    """SignSGD with decoupled decay, on the rows that the step has touched: row = row (1 - lr wd) - lr sign(sum).

    The result does not depend on who computed which gradient, not even in its bits: rows are put in the order of their
    slots before they are added.
    """

    divides_and_skips = True  # a sign is the same whatever the divisor, as long as it is positive
    found_inf: Tensor | None = None

    def __init__(self, tables: Iterable[Tensor], lr: float, weight_decay: float, world_size: int):
        (self.table,) = tables
        self.world_size = world_size
        self._touched: list[tuple[int, Tensor, Tensor]] = []
        # The table is no parameter: nobody else may exchange, clip or save it as one.
        super().__init__([{"params": []}], {"lr": lr, "weight_decay": weight_decay})

    def note(self, first: int, ids: Tensor, rows: Tensor) -> None:
        """These rows take part in the step: their places in the global batch are those from `first` on."""
        self._touched.append((first, ids.long(), rows))

    def forget(self) -> None:
        """The step is over, whether it was applied or not."""
        self._touched = []

    def get_active_indices(self) -> Tensor:
        """The ids that this rank's part of the step has touched."""
        return torch.cat([ids for _, ids, _ in self._touched]).unique()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        ids = torch.cat([ids for _, ids, _ in self._touched])
        gradients = torch.cat([rows.grad for _, _, rows in self._touched if rows.grad is not None])
        if self.world_size > 1:  # a single process goes through its slots in their order
            slots = torch.cat([first + torch.arange(len(i), device=i.device) for first, i, _ in self._touched])
            slots, ids, gradients = gather_rows([slots, ids, gradients], self.world_size)
            order = slots.argsort()
            ids, gradients = ids[order], gradients[order]
        self._update(ids, gradients)

    def _update(self, ids: Tensor, gradients: Tensor) -> None:
        """Of the same shapes in any world, and without asking the device how many ids there are."""
        group = self.param_groups[0]
        same = ids[:, None] == ids[None, :]
        first = same.to(torch.uint8).argmax(dim=1)  # where an id occurs first: equal ids get equal bits
        total = (same.double() @ gradients.double())[first]
        rows = self.table[ids]
        moved = rows * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * total.sign().to(self.table.dtype)
        self.table[ids] = moved if self.found_inf is None else torch.where(self.found_inf > 0, rows, moved)
