"""A script that takes one step, written by hand for torchrun and once more around `lockstep.start`.

`bench start` copies it into an empty folder and starts it with both launchers. The environment says which way to take,
and into which file rank 0 writes the time when its first step is done. Each way imports only what it needs.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

# Variables of the environment: "torchrun" or another way, and the file for the time.
WAY = "BENCH_WAY"
STAMP = "BENCH_STAMP"

BATCH = 32  # the batch of a rank


def by_hand(model: nn.Module, dataset: TensorDataset) -> None:
    """Take one step as people write it for torchrun."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3, fused=True)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset))

    # One step, whose end is the time that counts.
    x, y = next(iter(loader))  # [BATCH, 32], [BATCH]
    F.cross_entropy(ddp(x), y).backward()
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
    _done(dist.get_rank())

    # The end is not timed. A DDP over gloo that outlives its group may hang when it is freed (torch 2.13).
    dist.barrier()
    del ddp
    dist.destroy_process_group()


def with_lockstep(model: nn.Module, dataset: TensorDataset) -> None:
    """Take one step of an own loop."""
    import lockstep

    with lockstep.start(steps=1, local_batch=BATCH, clip={"norm": 1.0}, device="cpu") as run:
        model, _ = run.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
        for step in run.steps(dataset):
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))

            step.apply()
            _done(run.rank)


def _done(rank: int) -> None:
    """Write down the time of day, not `perf_counter`: the benchmark compares it with the time of its own start."""
    if rank == 0:
        Path(os.environ[STAMP]).write_text(repr(time.time()))


def main() -> None:
    """Take one step in the way that was asked for."""
    # Tiny, because only the start is of interest.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    dataset = TensorDataset(torch.randn(4096, 32), torch.randint(10, (4096,)))

    take = by_hand if os.environ[WAY] == "torchrun" else with_lockstep
    take(model, dataset)


if __name__ == "__main__":
    main()
