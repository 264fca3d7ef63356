"""The classifier of `train_torch.py`, in a loop of your own on Lockstep: the same result on any number of processes.

python examples/train_lockstep.py
lockstep train examples/train_lockstep.py --nproc 2
torchrun --nproc-per-node 2 examples/train_lockstep.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from train_torch import spirals

import lockstep


def main() -> None:
    dataset = spirals()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    with lockstep.start(global_batch=100, epochs=20, clip={"norm": 1.0}, log={"every": 30}) as run:
        model, optimizer = run.setup(model, optimizer)
        for step in run.steps(dataset):
            for x, y in step:
                # A sum and its weight, x (B, 2) and y (B,): Lockstep divides once, by the weight of all ranks.
                loss = F.cross_entropy(model(x), y, reduction="sum")
                step.backward(loss, weight=len(y))
            step.apply()

        found = run.evaluate(dataset, lambda model, batch: accuracy(model, *batch))
        if run.rank == 0:
            print(f"accuracy {found['accuracy']:.3f}")


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> lockstep.Loss:
    """Return the loss and the number of right labels. x is (B, 2), y is (B,)."""
    out = model(x)
    right = (out.argmax(dim=1) == y).sum()
    return lockstep.Loss(F.cross_entropy(out, y, reduction="sum"), len(y), {"accuracy": right})


if __name__ == "__main__":
    main()
