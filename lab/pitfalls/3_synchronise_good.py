"""Pitfall 3, done right: losses are added up on each rank, and all ranks reduce the sum once in 100 steps.

The course's good example prints the loss of rank 0, without any collective. That is cheap, but it is the loss of one
shard of the batch. Here the printed loss is that of all ranks.
"""

import torch
import torch.distributed as dist
from torch import nn

from lockstep.lab import Checks, CountCollectives, run_ranks

STEPS, LOG_EVERY = 100, 100


def main() -> None:
    """Train 100 small steps, and count the collectives that are for logging."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    checks = Checks("Pitfall 3: synchronising to print a loss")

    total = torch.zeros(1)
    with CountCollectives() as counted:
        for step in range(STEPS):
            # No .item() here: on a GPU it would make the host wait for the device in every step.
            total += model(torch.randn(8, 4)).square().mean().detach()
            if (step + 1) % LOG_EVERY == 0:
                # All ranks are at the same step, so all of them come here.
                dist.all_reduce(total)
                if dist.get_rank() == 0:
                    print(f"  step {step + 1}: loss {total.item() / LOG_EVERY / dist.get_world_size():.4f}", flush=True)
                total.zero_()

    calls: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(calls, counted.count("all_reduce"))
    checks.true("every rank calls the same collectives", len(set(calls)) == 1, f"all-reduces by rank: {calls}")
    checks.less("collectives for logging, per step", counted.count("all_reduce") / STEPS, 0.05)
    checks.finish()


if __name__ == "__main__":
    run_ranks(main)
