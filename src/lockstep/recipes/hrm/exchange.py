"""Rows that belong to places in the global batch, brought together from all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gather_rows(tensors: list[Tensor], size: int) -> list[Tensor]:
    """Each tensor with the rows of all ranks, in the order of ranks, which may hold unequally many. One message:
    whatever the formats, it travels as bytes."""
    if size == 1:
        return tensors
    rows = len(tensors[0])
    parts = [t.contiguous().view(rows, -1).view(torch.uint8) for t in tensors]
    widths = [part.shape[1] for part in parts]
    device = tensors[0].device
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([rows], device=device))
    most = max(int(count) for count in counts)  # the host waits here
    mine = torch.zeros(most, sum(widths), dtype=torch.uint8, device=device)
    mine[:rows] = torch.cat(parts, dim=1)
    everybody = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(everybody, mine)
    whole = torch.cat([part[: int(count)] for part, count in zip(everybody, counts, strict=True)])
    columns = whole.split(widths, dim=1)
    return [
        column.contiguous().view(tensor.dtype).view(-1, *tensor.shape[1:])
        for column, tensor in zip(columns, tensors, strict=True)
    ]
