"""Exercise 5: several nodes. docs/lab/05_multi_node.md explains it.

Fill in samples_of, save, load and fit_line. train has one mistake. Then type

lockstep lab check 5 lab/exercises/05_multi_node.py

`python lab/solution/05_multi_node.py` shows what a finished exercise does.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.lab.ranks import device
from lockstep.lab.workload.data import ShapeClass

GLOBAL_BATCH, EVERY = 12, 4


def samples_of(step: int, rank: int, world: int) -> range:
    """Return the samples of this rank in this step. All ranks together have the same samples on any number of ranks."""
    raise NotImplementedError("TODO 1: GLOBAL_BATCH samples for all ranks together, also if world does not divide it")


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write all that the steps from `step` on depend on, as step-000004.pt for step 4. Call it on every rank."""
    raise NotImplementedError("TODO 2: on rank 0, write a file so that it is there as a whole, or not at all")


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint that can be read, on all ranks, and return the step to begin with."""
    raise NotImplementedError("TODO 3: find the newest file that torch.load can read; 0 if there is none")


def train(folder: Path, steps: int) -> Tensor:
    """Train to step `steps`, from the newest checkpoint in `folder`. Returns all weights as one vector."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 8)).to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = ShapeClass(GLOBAL_BATCH * steps, pixels=8)

    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(load(folder, model, optimizer), steps):
        pictures, classes = data.batch(samples_of(step, rank, world))
        optimizer.zero_grad()
        # TODO 4: one of these lines is wrong on more than one rank.
        loss = F.cross_entropy(model(pictures.to(device())), classes.to(device()))
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if (step + 1) % EVERY == 0:
            save(folder, step + 1, model, optimizer)
    return torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])


def fit_line(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """Fit seconds = a + b * size and return (a, b): the latency, and the seconds per byte."""
    raise NotImplementedError("TODO 5: least squares (torch.linalg.lstsq); errors count relative to the seconds")


if __name__ == "__main__":
    print(__doc__)
