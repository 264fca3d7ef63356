"""A classifier of pictures. Replace the parts marked YOURS, one at a time: it trains after every change.

lockstep train FILE:Classifier --nproc 2
lockstep verify FILE:Classifier --worlds 1,2
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from lockstep import Loss, Task

CLASSES = 4


class Classifier(Task):
    # Any setting can be here; the command line overrides it: lr.peak=0.001. All of them: docs/configuration.md.
    defaults = {
        "steps": 60,
        "global_batch": 64,  # of all processes together: the result does not depend on their number
        "lr": {"peak": 0.01, "schedule": "cosine", "warmup": 5},
        "evaluate": {"every": 20},
        "checkpoint": {"best": "eval_loss"},
    }

    def __init__(self, *, width: int = 32):
        """YOURS: options of the task, with defaults. `task.width=64` sets one on the command line."""
        self.width = width

    def model(self) -> nn.Module:
        """YOURS: any module."""
        return nn.Sequential(
            nn.Conv2d(1, self.width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(self.width * 8 * 8, CLASSES),
        )

    def data(self) -> Dataset:
        """YOURS: any dataset with `__len__` and `__getitem__`; an iterable one works too."""
        return generated_pictures(2000, seed=0)

    def eval_data(self) -> Dataset:
        """YOURS: what to evaluate on. None: no evaluation."""
        return generated_pictures(400, seed=1)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        """Return the SUM over the batch, and the number of terms. Never divide by hand: Lockstep does it, once."""
        pictures, labels = batch
        scores = model(pictures)
        right = (scores.argmax(dim=1) == labels).sum()
        return Loss(F.cross_entropy(scores, labels, reduction="sum"), weight=len(labels), metrics={"accuracy": right})


def generated_pictures(count: int, seed: int) -> TensorDataset:
    """Return noise of shape (count, 1, 16, 16) with one bright quarter, and which quarter it is, (count,)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    pictures = torch.randn(count, 1, 16, 16, generator=generator)

    for quarter in range(CLASSES):
        row, column = 8 * (quarter // 2), 8 * (quarter % 2)
        pictures[labels == quarter, :, row : row + 8, column : column + 8] += 0.5

    return TensorDataset(pictures, labels)
