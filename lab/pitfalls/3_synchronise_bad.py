"""Pitfall 3, done wrong: a loss is all-reduced in every step, only to be printed.

The course's own bad example is worse than slow: rank 0 alone calls all_reduce. It waits for the others for ever, or is
paired with their next gradients. Here that is tried in a group of its own, with a limit of one second.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from lockstep.lab import Checks, CountCollectives, run_ranks

STEPS = 100


def main() -> None:
    """Train 100 small steps, and count the collectives that are for logging."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    checks = Checks("Pitfall 3: synchronising to print a loss")

    apart = dist.new_group(timeout=timedelta(seconds=1))
    with CountCollectives() as counted:
        # As the course has it: `if rank == 0: dist.all_reduce(loss)`.
        if dist.get_rank() == 0:
            try:
                dist.all_reduce(torch.zeros(1), group=apart)
            except RuntimeError:
                print("  rank 0 alone called all_reduce, and waited in vain", flush=True)

        # On all ranks it works, and every step waits for the slowest rank once more.
        for _ in range(STEPS):
            loss = model(torch.randn(8, 4)).square().mean().detach()
            dist.all_reduce(loss)
            loss.item()

    calls: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(calls, counted.count("all_reduce"))
    checks.true("every rank calls the same collectives", len(set(calls)) == 1, f"all-reduces by rank: {calls}")
    checks.less("collectives for logging, per step", counted.count("all_reduce") / STEPS, 0.05)
    checks.finish()


if __name__ == "__main__":
    run_ranks(main)
