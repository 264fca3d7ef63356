"""Pitfall 2, done right: each loss is divided by the number of accumulation steps."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.lab import Checks, run_ranks

STEPS = 4


def main() -> None:
    """Accumulate 4 batches of 8 on each rank, and compare with one batch of 32."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    batches = torch.randn(STEPS, 8, 10)
    model = DistributedDataParallel(nn.Linear(10, 1))

    for step in range(STEPS):
        # One all-reduce, in the last backward.
        with contextlib.nullcontext() if step == STEPS - 1 else model.no_sync():
            loss = model(batches[step]).square().mean() / STEPS
            loss.backward()
    accumulated = model.module.weight.grad.clone()

    model.zero_grad()
    model(batches.flatten(0, 1)).square().mean().backward()
    ratio = (accumulated.norm() / model.module.weight.grad.norm()).item()
    checks = Checks("Pitfall 2: the gradient of 4 small batches against one large")
    checks.less("it is the same gradient (ratio - 1)", abs(ratio - 1), 1e-5)
    print(f"  rank {dist.get_rank()}: {ratio:.4f} times as large", flush=True)
    checks.finish()


if __name__ == "__main__":
    run_ranks(main)
