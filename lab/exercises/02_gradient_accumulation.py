"""Exercise 2: a batch that does not fit into memory, as several micro-batches.

Gradients add up in `.grad` until `zero_grad` is called. So a batch of 128 can be computed as 4 micro-batches of 32, if
each loss is scaled, and if the ranks exchange their gradients once per update and not once per micro-batch.

The functions below look right and run without an error. They hold four mistakes: find them. Then type

    lockstep lab check 2 lab/exercises/02_gradient_accumulation.py

docs/lab/02_gradient_accumulation.md explains the idea.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from lockstep.lab import CountCollectives, ShapeClass, backend, device, resnet_tiny, run_ranks

Batch = tuple[Tensor, Tensor]  # pictures [B, 3, H, W] and classes [B]


# ---- 1. one update ----


def accumulated_step(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: Sequence[Batch]) -> None:
    """Take one step on all micro-batches together. `model` may be a DDP."""
    # TODO 1: how large is the gradient after four of these backward passes?
    # TODO 2: the micro-batches may have different numbers of samples.
    # TODO 3: under DDP each backward exchanges gradients. Once per update is enough (model.no_sync).
    optimizer.zero_grad()
    for pictures, labels in micro_batches:
        loss = F.cross_entropy(model(pictures.to(device())), labels.to(device()))
        loss.backward()
    optimizer.step()


# ---- 2. one epoch ----


def train_epoch(
    model: nn.Module, micro_batches: Iterable[Batch], optimizer: torch.optim.Optimizer, accumulate: int
) -> int:
    """Update after every `accumulate` micro-batches, and after the rest at the end. Returns the number of updates."""
    # TODO 4: what happens to the last micro-batches of an epoch?
    updates, window = 0, []
    for batch in micro_batches:
        window.append(batch)
        if len(window) == accumulate:
            accumulated_step(model, optimizer, window)
            updates, window = updates + 1, []
    return updates


def effective_batch(micro_batch: int, accumulate: int, ranks: int) -> int:
    """Return the number of samples of one update."""
    # TODO 5
    raise NotImplementedError("multiply")


def main() -> None:
    dist.init_process_group(backend())
    model = DDP(resnet_tiny(norm="group").to(device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    dataset = ShapeClass(80, pixels=16)
    batches = [
        dataset.batch(range(start, start + 8)) for start in range(dist.get_rank() * 40, dist.get_rank() * 40 + 40, 8)
    ]
    with CountCollectives() as counted:
        updates = train_epoch(model, batches, optimizer, accumulate=2)
    if dist.get_rank() == 0:
        print(f"{updates} updates of {len(batches)} micro-batches, {counted.count('all_reduce')} all-reduces")
    # run_ranks leaves the group when this function has ended. A DDP that outlives its group may hang (torch 2.13).


if __name__ == "__main__":
    run_ranks(main)
