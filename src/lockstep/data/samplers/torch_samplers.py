"""Samplers of torch, as samplers whose order is a pure function of (seed, epoch).

A sampler of torch draws from a generator when it is iterated over. Here it is seeded for each epoch and listed as a
whole, so its order depends on seed and epoch alone. Samplers that have an equivalent here are replaced by it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, RandomSampler, WeightedRandomSampler
from torch.utils.data import Sampler as TorchSampler
from torch.utils.data import SequentialSampler as TorchSequentialSampler

from lockstep.data.samplers.sampler import OrderCache, Sampled, Sampler
from lockstep.data.samplers.shuffled import SequentialSampler, ShuffledSampler
from lockstep.data.samplers.weighted import WeightedSampler
from lockstep.errors import UserError
from lockstep.runtime.seeds import derive, preserve_rng, seed_everything


def as_sampler(sampler: Any, samples: int, seed: int) -> Sampler:
    """Return the sampler that a run uses, with the run's seed, for a sampler of a user. None: shuffled.

    `samples` is the length of the dataset.
    """
    if sampler is None:
        return ShuffledSampler(samples, seed)
    if isinstance(sampler, Sampler):
        return sampler.with_seed(seed) if hasattr(sampler, "with_seed") else sampler
    if isinstance(sampler, TorchSampler):
        return from_torch(sampler, samples, seed)

    raise UserError(
        f"a sampler must have ids(epoch, start, stop) and __len__(); a {type(sampler).__name__} does not have both",
        "",
        "see 'A custom sampler' in docs/data.md, or use one of lockstep.data.samplers",
    )


def bind_sampler(data: Any, seed: int) -> Any:
    """Return `Sampled` data with the sampler that the run uses, whose length may differ. Return other data as it is."""
    if not isinstance(data, Sampled) or data.sampler is None or not hasattr(data.dataset, "__len__"):
        return data

    return Sampled(data.dataset, as_sampler(data.sampler, len(data.dataset), seed), data.known_lengths)


def from_torch(sampler: Any, samples: int, seed: int) -> Sampler:
    """Return our sampler that draws as this one of torch does: the distribution is the same, the order is not."""
    # Subclasses may do anything, so only the exact types are known.
    kind = type(sampler)
    if kind is TorchSequentialSampler:
        return SequentialSampler(samples)
    if kind is WeightedRandomSampler:
        return WeightedSampler(sampler.weights.numpy(), sampler.num_samples, sampler.replacement, seed)
    if kind is DistributedSampler:
        # A run divides the samples among the ranks itself.
        return ShuffledSampler(samples, seed) if sampler.shuffle else SequentialSampler(samples)

    if kind is RandomSampler and sampler.replacement:
        return WeightedSampler(np.ones(samples), sampler.num_samples, True, seed)
    if kind is RandomSampler and sampler.num_samples == samples:
        return ShuffledSampler(samples, seed)

    return ListedSampler(sampler, samples, seed)


class ListedSampler:
    """Any other sampler of torch: each epoch is listed at once, after the global generators were seeded by the epoch.

    This is a pure function of (seed, epoch) if the sampler draws from the global generators, or from `generator`, and
    keeps no state of its own. The first epoch is listed twice, to check that.
    """

    def __init__(self, sampler: TorchSampler, samples: int, seed: int):
        self._sampler = sampler
        self._samples = samples
        self._seed = seed
        self._orders = OrderCache()

        first = self._list(0)
        if not np.array_equal(first, self._list(0)):
            raise UserError(
                f"{type(sampler).__name__} gives another order each time for the same seed and epoch",
                "it keeps state of its own, so a resumed run could not repeat its order",
                "draw from torch's global generator in __iter__, or write ids(epoch, start, stop): see 'A custom "
                "sampler' in docs/data.md",
            )

        self._length = len(first)

    def __len__(self) -> int:
        return self._length

    def ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        order = self._orders.get(epoch, lambda: self._list(epoch))
        if len(order) != self._length:
            raise UserError(
                f"{type(self._sampler).__name__} gives {len(order)} samples in epoch {epoch}, and {self._length} in "
                "epoch 0",
                "positions are counted in epochs of equal length",
                "let every epoch have the same number of samples",
            )
        return order[start:stop].copy()

    def _list(self, epoch: int) -> np.ndarray:
        """Return all ids of an epoch (int64)."""
        set_epoch = getattr(self._sampler, "set_epoch", None)
        generator = getattr(self._sampler, "generator", None)
        value = derive(self._seed, "sampler", epoch)

        # Whatever the sampler draws from is seeded: torch's generator, its own one, or the epoch that it is told.
        with preserve_rng(torch.device("cpu")):
            seed_everything(value)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(value)
            if set_epoch is not None:
                set_epoch(epoch)
            listed = list(self._sampler)

        return self._checked(listed)

    def _checked(self, listed: list[Any]) -> np.ndarray:
        """Return the list as an array. Raises a UserError unless it has ids of the dataset."""
        name = type(self._sampler).__name__
        if not listed or not all(isinstance(index, int | np.integer) for index in listed):
            raise UserError(
                f"{name} must give whole numbers, the ids of samples",
                f"it gave {listed[0]!r}" if listed else "it gave nothing",
                "a sampler of batches cannot be used: Lockstep makes the batches, from global_batch and micro_batch",
            )

        ids = np.array(listed, dtype=np.int64)
        if ids.min() < 0 or ids.max() >= self._samples:
            raise UserError(
                f"{name} gave sample {ids.max() if ids.max() >= self._samples else ids.min()} of a dataset of "
                f"{self._samples} samples",
                "",
                "make the sampler for this dataset",
            )

        return ids
