"""Exercise 8, resume: kill a run, go on with another number of ranks, train every sample once.

Read docs/lab/08_resume.md first, then fix what is marked, and type

    lockstep lab check 8 lab/exercises/08_resume.py

The code below is what most training scripts do. It resumes without an error, and trains another model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep import Loss, Sampled, Task

SAMPLES = 96
BATCH = 12  # samples of a step, over all ranks: 8 steps an epoch
STEPS = 16  # two epochs
SAVE_EVERY = 2


def make_data() -> TensorDataset:
    """Return 96 points in 8 dimensions, in four classes."""
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :4].argmax(1))


def make_model() -> nn.Module:
    """Return a small classifier, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum: the momentum is state, too."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Order:
    """Every sample once per epoch. What is at a place of the epoch can be computed at any time, on any rank."""

    def __init__(self, samples: int, seed: int):
        self.samples = samples
        self.random = np.random.default_rng(seed)

    def __len__(self) -> int:
        return self.samples

    def ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return the samples at the places [start, stop) of an epoch: a pure function of its arguments."""
        # TODO: a generator that is kept remembers what was asked before. A resumed process has asked nothing.
        order = self.random.permutation(self.samples)
        return order[start:stop].astype(np.int64)


def my_ids(order: Order, step: int, rank: int, world: int) -> list[int]:
    """Return this rank's samples of a step. All ranks together have the same 12, whatever `world` is."""
    epoch, index = divmod(step, len(order) // BATCH)
    batch = order.ids(epoch, index * BATCH, (index + 1) * BATCH)

    # TODO: is this all of the batch on 5 ranks?
    share = BATCH // world
    return batch[rank * share : (rank + 1) * share].tolist()


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint; a kill in the middle leaves the old one intact."""
    if dist.get_rank() == 0:
        # TODO: what else does the next step depend on? And what is left if the process dies in torch.save?
        torch.save({"step": step, "model": model.state_dict()}, path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Read a checkpoint; return the number of steps that are done."""
    state = torch.load(path)
    model.load_state_dict(state["model"])
    return state["step"]


def train(path: Path, until: int, on_step: Callable[[int, list[int]], None]) -> list[Tensor]:
    """Train to step `until` on all ranks, from the checkpoint if there is one; return the weights.

    `on_step(step, ids)` is called before each step, with the samples of this rank.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    model, data, order = make_model(), make_data(), Order(SAMPLES, seed=0)
    optimizer = make_optimizer(model)
    begin = load(path, model, optimizer) if path.exists() else 0
    dist.barrier()  # or a fast rank would save before a slow one has looked

    for step in range(begin, until):
        ids = my_ids(order, step, rank, world)
        on_step(step, ids)

        # TODO: the mean of the ranks' means. When is that the mean of the batch?
        x, y = data[ids]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()

        if (step + 1) % SAVE_EVERY == 0:
            save(path, step + 1, model, optimizer)

    dist.barrier()  # no rank is done before the last checkpoint is: the next start must find it on every rank
    return [parameter.detach().clone() for parameter in model.parameters()]


class Points(Task):
    """The same data and the same order; which rank gets what, saving and resuming are Lockstep's."""

    defaults = {"steps": STEPS, "global_batch": BATCH, "micro_batch": 2, "checkpoint": {"every": SAVE_EVERY}}

    def model(self) -> nn.Module:
        """Return the small classifier."""
        return make_model()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return make_optimizer(model)

    def data(self) -> Sampled:
        """Return the samples with our own order. A plain dataset would be shuffled by Lockstep, as exactly."""
        return Sampled(make_data(), Order(SAMPLES, seed=0))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        """Return a sum with a weight."""
        x, y = batch
        return Loss(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
