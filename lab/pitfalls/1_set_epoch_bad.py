"""Pitfall 1, done wrong: set_epoch is forgotten, so every epoch has the same order."""

import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from lockstep.lab import Checks, run_ranks


def main() -> None:
    """Read two epochs on each rank, and compare the orders."""
    dist.init_process_group("gloo")
    dataset = list(range(40))
    sampler = DistributedSampler(dataset, shuffle=True, seed=0)
    loader = DataLoader(dataset, batch_size=5, sampler=sampler)

    epochs = []
    for _ in range(2):
        epochs.append([sample for batch in loader for sample in batch.tolist()])

    checks = Checks("Pitfall 1: the order of the epochs")
    checks.true("the second epoch has another order than the first", epochs[0] != epochs[1], epochs[1][:5])
    checks.finish()


if __name__ == "__main__":
    run_ranks(main)
