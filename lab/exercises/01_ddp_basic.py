"""Exercise 1: data parallelism by hand.

Every rank has a copy of the model and its own part of each batch. After the backward pass the ranks average their
gradients with an all-reduce, so all copies take the same step.

Fill in what says TODO, and find the two mistakes in `train`. Then type

    lockstep lab check 1 lab/exercises/01_ddp_basic.py

and, when it has passed, python lab/exercises/01_ddp_basic.py. docs/lab/01_ddp_basic.md explains the idea.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lockstep.lab import ShapeClass, backend, device, resnet_tiny, run_ranks

# ---- 1. the process group ----


def setup() -> torch.device:
    """Join the group that the launcher has announced in RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    # TODO 1: dist.init_process_group with the backend that backend() returns. It reads the variables by itself.
    raise NotImplementedError("join the process group")

    # The device follows from LOCAL_RANK. The global rank would name a GPU that a second machine does not have.
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    return device()


# ---- 2. DDP from scratch ----


class OwnDDP(nn.Module):
    """Averages the gradients of all ranks while the backward pass is still running."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

        # TODO 2: all copies must begin with the weights and buffers of rank 0 (dist.broadcast). Send tensor.detach():
        # torch warns that it cannot differentiate a broadcast.

        # Autograd calls the hook as soon as a parameter's gradient is complete: the last layer's comes first.
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._gradient_is_ready)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.module(*inputs)

    def _gradient_is_ready(self, parameter: Tensor) -> None:
        # TODO 3: replace parameter.grad by the mean over all ranks (dist.all_reduce). Waiting for it here is right;
        # async_op=True, and waiting with the last gradient, is faster.
        raise NotImplementedError("average the gradient over all ranks")


# ---- 3. each rank's part of the data ----


def make_loader(dataset: Dataset, batch: int) -> DataLoader:
    """Return a loader over this rank's samples, in an order that is shuffled for each epoch."""
    # TODO 4: this gives every rank all samples. Use a DistributedSampler.
    return DataLoader(dataset, batch_size=batch, shuffle=True)


# ---- 4. the loop ----


def train(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Train as on one process: the gradients are averaged inside of `backward`."""
    # TODO 5: two lines are missing. One belongs to each epoch, the other to each step.
    for epoch in range(epochs):
        for pictures, labels in loader:
            loss = F.cross_entropy(model(pictures.to(device())), labels.to(device()))
            loss.backward()
            optimizer.step()


# ---- 5. the proof ----


def replica_difference(model: nn.Module) -> float:
    """Return how far any parameter of any rank is from rank 0's. All ranks call it, and all get the same number."""
    # TODO 6: broadcast a detached copy of rank 0's parameter, compare, and all-reduce the largest difference
    # (ReduceOp.MAX).
    raise NotImplementedError("compare the replicas")


def main() -> None:
    setup()
    model = OwnDDP(resnet_tiny(norm="group").to(device()))
    loader = make_loader(ShapeClass(256), batch=16)
    train(model, loader, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), epochs=1)
    difference = replica_difference(model)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, largest difference between replicas: {difference}")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_ranks(main)
