"""A task that trains next to nothing, in the order of a sampler: for runs, and as a file for `lockstep train`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from lockstep import Loss, Mixture, Sampled, Task
from lockstep.data.packing import PackedDataset, packed_batch
from lockstep.data.samplers import BucketedSampler, CurriculumSampler, WeightedSampler

LENGTH, BATCH = 44, 8  # the last step of an epoch is short
LENGTHS = np.random.default_rng(0).integers(3, 20, LENGTH)


def rows(start: int, count: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(start), float(start + count))[:, None])


KINDS = {
    "with replacement": lambda: Sampled(rows(0, LENGTH), WeightedSampler(LENGTHS)),
    "without replacement": lambda: Sampled(rows(0, LENGTH), WeightedSampler(LENGTHS, replacement=False)),
    "bucketed": lambda: Sampled(rows(0, LENGTH), BucketedSampler(LENGTHS, batch=4, pool=3)),
    "curriculum": lambda: Sampled(rows(0, LENGTH), CurriculumSampler(LENGTHS)),
    "mixture": lambda: Mixture([(rows(0, 20), 3), (rows(20, 24), 1)]),
    "loader": lambda: DataLoader(rows(0, LENGTH), BATCH, sampler=WeightedRandomSampler([*range(LENGTH)], LENGTH)),
    "lengths": lambda: Sampled(rows(0, LENGTH), lengths=LENGTHS),
    "packed": lambda: PackedDataset([torch.full((n,), i) for i, n in enumerate(LENGTHS)], 32, LENGTHS),
}
# What the data does not say by itself.
SETTINGS = {kind: {"global_batch": BATCH} for kind in KINDS} | {"loader": {}}
SETTINGS["lengths"] |= {"data.balance": "length"}

# In each epoch every sample comes once.
ONCE = ("without replacement", "bucketed", "lengths", "packed")


class Sampling(Task):
    defaults = {"micro_batch": 2}

    def __init__(self, kind: str):
        self.kind = kind

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def data(self) -> Any:
        return KINDS[self.kind]()

    def collate(self, samples: list[Any]) -> Any:
        if self.kind != "packed":
            return super().collate(samples)
        return [packed_batch(samples, row_length=32)["input_ids"].flatten()[:, None].float()]

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        return Loss(model(batch[0]).sum() / 1000, len(batch[0]))
