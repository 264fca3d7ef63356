"""Exercise 9, determinism: make 1, 2 and 4 ranks give the same bits. Read docs/lab/09_determinism.md first.

    lockstep lab check 9 lab/exercises/09_determinism.py

Two functions are wrong, one is missing, and the task has a mistake that only `lockstep verify` sees.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep import Loss, Task

MICRO_BATCHES = 8  # of every step, on any number of ranks


def mine(rank: int, world: int) -> range:
    """Return the numbers of this rank's micro-batches, out of 0 to 7, on 1, 2 or 4 ranks."""
    # TODO: every second micro-batch is how DistributedSampler would share them. Is that a part of the tree?
    return range(rank, MICRO_BATCHES, world)


def tree_sum(parts: list[Tensor]) -> Tensor:
    """Add 1, 2, 4 or 8 tensors in the order of a binary tree: (a + b) + (c + d)."""
    raise NotImplementedError("TODO: add neighbours, then neighbouring pairs, until one tensor is left")


def add_up(parts: list[Tensor], group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum of the micro-batches of all ranks. `parts` are those of this rank."""
    # TODO: right up to rounding, and not to the bit.
    total = torch.stack(parts).sum(0)
    dist.all_reduce(total, group=group)
    return total


class Small(Task):
    """A small classifier with noise on its input, for `lockstep verify FILE:Small --exact`."""

    defaults = {"steps": 6, "global_batch": 32, "micro_batch": 4, "lr": {"peak": 0.01}}

    def __init__(self) -> None:
        # TODO: "every rank needs noise of its own" is the usual advice. What does it do to the bits?
        self.noise = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))

    def model(self) -> nn.Module:
        """Return the model; Lockstep makes its weights the same on all ranks."""
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

    def data(self) -> TensorDataset:
        """Return all samples; Lockstep shards them."""
        x = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x[:, :4].argmax(1))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        """Return the summed loss of a micro-batch, and its number of samples."""
        x, y = batch
        x = x + 0.1 * torch.randn(x.shape, generator=self.noise)
        return Loss(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
