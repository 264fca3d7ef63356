"""A small classifier in plain PyTorch: one process. `train_lockstep.py` is the same on any number of processes.

python examples/train_torch.py
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def spirals(samples: int = 3000, arms: int = 3) -> TensorDataset:
    """Points on three spiral arms; the label is the arm."""
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(samples) % arms
    radius = torch.rand(samples, generator=generator)
    angle = 4 * radius + label * (2 * math.pi / arms) + 0.2 * torch.randn(samples, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), label)


def main() -> None:
    dataset = spirals()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(dataset, batch_size=100, shuffle=True)

    for epoch in range(20):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        print(f"epoch {epoch + 1:2}  loss {loss.item():.3f}")

    x, y = dataset.tensors
    print(f"accuracy {(model(x).argmax(dim=1) == y).float().mean():.3f}")


if __name__ == "__main__":
    main()
