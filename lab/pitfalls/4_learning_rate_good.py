"""Pitfall 4, done right: a batch 4 times as large gets 4 times the learning rate (the linear rule)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.lab import Checks, run_ranks

BATCH, RATE, SAMPLES = 32, 0.01, 4096


def train(model: nn.Module, inputs: Tensor, labels: Tensor, rate: float) -> None:
    """Train over these batches: inputs [steps, batch, 20] and labels [steps, batch]."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for x, y in zip(inputs, labels, strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def main() -> None:
    """Train with batch 32 on one rank, and with 128 on all ranks together; compare after the same samples."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 20)
    labels = (inputs @ torch.randn(20, 4)).argmax(dim=1)
    torch.manual_seed(1)
    small, large = nn.Linear(20, 4), nn.Linear(20, 4)
    large.load_state_dict(small.state_dict())

    train(small, inputs.view(-1, BATCH, 20), labels.view(-1, BATCH), RATE)

    # 4 x 32 samples in every step, shared out among the ranks.
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = inputs.view(-1, 4 * BATCH, 20)[:, rank::world], labels.view(-1, 4 * BATCH)[:, rank::world]
    train(DistributedDataParallel(large), *mine, 4 * RATE)

    with torch.no_grad():
        losses = [F.cross_entropy(model(inputs), labels).item() for model in (small, large)]
    print(f"  rank {rank}: loss {losses[0]:.4f} with batch 32, {losses[1]:.4f} with batch 128", flush=True)
    checks = Checks("Pitfall 4: a larger batch after the same number of samples")
    checks.less("batch 128 has learned as much as batch 32 (loss / loss - 1)", losses[1] / losses[0] - 1, 0.05)
    checks.finish()


if __name__ == "__main__":
    run_ranks(main)
