"""Check that DDPManager works on this machine, on one process or on as many ranks as there are GPUs.

python finalization/test_ddp.py
torchrun --nproc_per_node=2 finalization/test_ddp.py
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.classic import DDPManager, log_gpu_memory

SAMPLES = 24


def reads_of_each_sample(manager: DDPManager) -> list[float]:
    """Count how often each sample is read in one epoch, by all ranks together."""
    reads = torch.zeros(SAMPLES, device=manager.device)
    dataset = TensorDataset(torch.arange(SAMPLES))

    # A global batch of 4, whatever the number of ranks.
    for (ids,) in manager.get_dataloader(dataset, batch_size=4 // manager.world_size):
        reads[ids.to(manager.device)] += 1
    return manager.all_reduce(reads, "sum").tolist()


def mean_gradient(manager: DDPManager) -> tuple[float, float]:
    """Return the gradient of a wrapped model, where rank r has the sample r, and the value it should have."""
    model = manager.wrap_model(nn.Linear(1, 1, bias=False))
    sample = torch.full((1, 1), float(manager.rank), device=manager.device)
    model(sample).sum().backward()

    (weight,) = model.parameters()
    return weight.grad.item(), (manager.world_size - 1) / 2


def main() -> None:
    manager = DDPManager()
    manager.initialize(timeout_mins=5)

    reads = reads_of_each_sample(manager)
    assert reads == [1.0] * SAMPLES, f"some samples are read never or more than once: {reads}"

    gradient, mean = mean_gradient(manager)
    assert gradient == mean, f"the gradient on rank {manager.rank} is {gradient}, and the mean is {mean}"

    manager.barrier()
    if manager.is_main:
        log_gpu_memory()
        print(f"ok: {manager.world_size} ranks, {manager.device}, {manager.backend}")
    manager.cleanup()


if __name__ == "__main__":
    main()
