"""Your own loop. Replace the parts marked YOURS, one at a time: it trains after every change.

lockstep train FILE --nproc 2
lockstep verify FILE --worlds 1,2
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep


def make_model() -> nn.Module:
    """YOURS: any module."""
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))


def make_data(count: int, seed: int) -> Dataset:
    """YOURS: any dataset. It needs no DataLoader: order, batches and sharding are Lockstep's work."""
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.norm(dim=1) > 2.7).long())


def evaluate(model: nn.Module, batch: tuple[Tensor, Tensor]) -> lockstep.Loss:
    """YOURS: the SUM over one batch of the evaluation, and the number of its terms."""
    x, y = batch
    scores = model(x)
    right = (scores.argmax(dim=1) == y).sum()
    total = F.cross_entropy(scores, y, reduction="sum")
    return lockstep.Loss(total, weight=len(y), metrics={"accuracy": right})


# Any setting can be an argument; the command line overrides it: steps=100. All of them: docs/configuration.md.
with lockstep.start(global_batch=64, steps=60, clip={"norm": 1.0}, lr={"schedule": "cosine"}) as run:
    plain = make_model()
    model, optimizer = run.setup(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))

    for step in run.steps(make_data(2000, seed=0)):
        # The batches of this process, on its device. Backpropagate sums: `apply` divides once, by all weights.
        for x, y in step:
            loss = F.cross_entropy(model(x), y, reduction="sum")
            step.backward(loss, weight=len(y))

        step.apply()

    # Every process must call it, and every sample counts once.
    found = run.evaluate(make_data(400, seed=1), evaluate)
    if run.rank == 0:
        print(f"accuracy {found['accuracy']:.3f}")
