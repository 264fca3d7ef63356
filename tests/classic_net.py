"""What the tests of the classic interfaces share: a small net, its data, and how a rank of the pool joins."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.runtime.context import join
from lockstep.runtime.world import World


class Net(nn.Module):
    """Returns its loss, the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.out(torch.tanh(self.hidden(x))).squeeze(-1).float(), y)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def numbers(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=g), torch.randn(count, generator=g)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def among(world: World, store: Any) -> None:
    join(world, torch.device("cpu"), store)


def write_rank(rank: int, world_size: int, folder: str) -> None:
    """Join as the documents do, and leave a file. Here, because a spawned process imports the file of its function."""
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    Path(folder, str(rank)).write_text(f"{total.item()} {os.environ['LOCAL_RANK']}")
    dist.destroy_process_group()
