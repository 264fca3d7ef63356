"""A contrastive loss in an own loop, whose rows are gathered by torch.distributed: on one process there are fewer."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep

generator = torch.Generator().manual_seed(0)
left = torch.randn(96, 6, generator=generator)
right = left + 0.3 * torch.randn(96, 6, generator=generator)


def gather(rows: Tensor, rank: int, size: int) -> Tensor:
    if size == 1:
        return rows

    parts = [torch.zeros_like(rows) for _ in range(size)]
    dist.all_gather(parts, rows.detach())
    parts[rank] = rows
    return torch.cat(parts)


with lockstep.start(global_batch=16, steps=6) as run:
    model = nn.Linear(6, 4)
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(TensorDataset(left, right)):
        for a, b in step:
            others = gather(model(b), run.rank, run.world_size)
            labels = run.rank * len(a) + torch.arange(len(a))
            step.backward(F.cross_entropy(model(a) @ others.T, labels, reduction="sum"), weight=len(a))
        step.apply()
