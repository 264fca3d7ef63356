"""Does DDPManager work here? Alone, or with as many ranks as you have GPUs:

python finalization/test_ddp.py
torchrun --nproc_per_node=2 finalization/test_ddp.py
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.classic import DDPManager, log_gpu_memory

SAMPLES = 24


def samples_of_all_ranks(manager: DDPManager) -> list[float]:
    """How often each sample was dealt in one epoch, to whomever."""
    seen = torch.zeros(SAMPLES, device=manager.device)
    for (ids,) in manager.get_dataloader(TensorDataset(torch.arange(SAMPLES)), batch_size=4 // manager.world_size):
        seen[ids.to(manager.device)] += 1
    return manager.all_reduce(seen, "sum").tolist()


def gradient_of_all_ranks(manager: DDPManager) -> tuple[float, float]:
    """Of a wrapped model, where rank r has the sample r: as found, and as it should be."""
    model = manager.wrap_model(nn.Linear(1, 1, bias=False))
    model(torch.full((1, 1), float(manager.rank), device=manager.device)).sum().backward()
    (weight,) = model.parameters()
    return weight.grad.item(), (manager.world_size - 1) / 2


def main() -> None:
    manager = DDPManager()
    manager.initialize(timeout_mins=5)
    dealt = samples_of_all_ranks(manager)
    assert dealt == [1.0] * SAMPLES, f"samples missing, or dealt twice: {dealt}"
    found, expected = gradient_of_all_ranks(manager)
    assert found == expected, f"the gradient is {found} on rank {manager.rank}, not the mean, {expected}"
    manager.barrier()
    if manager.is_main:
        log_gpu_memory()
        print(f"ok: {manager.world_size} ranks, {manager.device}, {manager.backend}")
    manager.cleanup()


if __name__ == "__main__":
    main()
