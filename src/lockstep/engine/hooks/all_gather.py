"""All-gather with a gradient: a loss on one rank may depend on the rows of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.runtime.collectives import Collectives


def gather_rows(rows: Tensor, collectives: Collectives) -> Tensor:
    """Return the rows (n, ...) of all ranks, in the order of the ranks: (N, ...). Collective.

    The losses of all ranks are added, so the gradient of a rank's rows is the sum of the gradients on all ranks.
    """
    # The numbers of rows differ at the end of an epoch. Reading them makes the host wait for the device.
    counts = collectives.gather(torch.tensor([len(rows)], device=rows.device)).flatten().tolist()
    return _GatherRows.apply(rows, collectives, counts)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, collectives: Collectives, counts: list[int]) -> Tensor:
        ctx.collectives = collectives
        ctx.counts = counts

        # All ranks must send the same shape: pad to the largest.
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        gathered = collectives.gather(padded)
        return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # Added in float32, because 16 bits would lose much of the other ranks' shares.
        (gradient,) = gradients
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = ctx.collectives.all_reduce_(gradient.to(wide, copy=True).contiguous())
        own = total.split(ctx.counts)[ctx.collectives.world.rank]
        return own.to(gradient.dtype), None, None
