"""Samplers of torch, as samplers whose order is a pure function of (seed, epoch).

A sampler of torch draws from a generator when it is iterated over. Here it is seeded for each epoch and listed as a
whole, so its order depends on seed and epoch alone. Samplers that have an equivalent here are replaced by it.
"""

from __future__ import annotations

from itertools import islice
from operator import index
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, RandomSampler, WeightedRandomSampler
from torch.utils.data import Sampler as TorchSampler
from torch.utils.data import SequentialSampler as TorchSequentialSampler

from lockstep.data.samplers.sampler import Sampled, Sampler, SeededSampler, check_in_dataset
from lockstep.data.samplers.shuffled import OrderCache, SequentialSampler, ShuffledSampler
from lockstep.data.samplers.weighted import WeightedSampler
from lockstep.errors import UserError
from lockstep.runtime.seeds import derive, preserve_rng, seed_everything

COMPARED = 64  # ids of a sampler that are asked for twice
LONGEST = 10_000_000  # samples that an epoch of a listed sampler may have, whatever the length of the dataset


def as_sampler(sampler: Any, samples: int, seed: int) -> Sampler:
    """Return the sampler that a run uses, with the run's seed, for a sampler of a user. None: shuffled.

    `samples` is the length of the dataset.
    """
    if sampler is None:
        return ShuffledSampler(samples, seed)

    if isinstance(sampler, Sampler):
        _check_fits(sampler, samples)
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


def _check_fits(sampler: Any, samples: int) -> None:
    """Raise if a sampler is made for a dataset of another length, or is no pure function."""
    name = type(sampler).__name__

    made_for = getattr(sampler, "dataset_length", samples)
    if made_for != samples:
        raise UserError(
            f"{name} is made for {made_for} samples, and the dataset has {samples}",
            "it would leave samples out, or ask for some that are not there",
            "give it one number for each sample of the dataset",
        )

    # Those with a key are pure by construction; a sampler that draws from a global generator is not.
    count = 0 if isinstance(sampler, SeededSampler) else min(len(sampler), COMPARED)
    if count and not np.array_equal(sampler.ids(0, 0, count), sampler.ids(0, 0, count)):
        raise UserError(
            f"{name}.ids gives other ids each time for the same arguments",
            "ranks would train different samples, and a resumed run could not repeat the order",
            "draw from a generator that is seeded in ids, by the epoch: np.random.default_rng([seed, epoch])",
        )


def from_torch(sampler: Any, samples: int, seed: int) -> Sampler:
    """Return our counterpart of a torch sampler. It draws from the same distribution, in another order."""
    # Subclasses may do anything, so only the exact types are known.
    kind = type(sampler)
    _refuse_part(sampler, samples)
    if not covers(sampler, samples):
        return ListedSampler(sampler, samples, seed)

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


def covers(sampler: Any, samples: int) -> bool:
    """Return whether a sampler of torch chooses from `samples` samples: RandomSampler(range(50)) chooses from 50."""
    chosen_from: Any = sampler.dataset if type(sampler) is DistributedSampler else getattr(sampler, "data_source", None)
    return chosen_from is None or len(chosen_from) == samples


def _refuse_part(sampler: Any, samples: int) -> None:
    """Raise if a sampler gives one rank's part of the dataset: a run divides the samples itself."""
    name = type(sampler).__name__
    advice = "use the sampler without ranks, or write ids(epoch, start, stop): see 'A custom sampler' in docs/data.md"
    if type(sampler) is not DistributedSampler:
        if getattr(sampler, "num_replicas", 1) != 1:
            raise UserError(f"{name} gives the samples of one rank, and a run divides them itself", "", advice)
        return

    if not covers(sampler, samples):
        dataset: Any = sampler.dataset
        raise UserError(
            f"{name} is made for {len(dataset)} samples, and the dataset has {samples}",
            "",
            "make it for the same dataset, or leave it out",
        )


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

        # Not through the cache, which would give the same list twice.
        first = self._list(0)
        if not np.array_equal(first, self._list(0)):
            raise UserError(
                f"{type(sampler).__name__} gives another order each time for the same seed and epoch",
                "it keeps state of its own, as a generator made in __init__; a resumed run could not repeat its order",
                "make the generator in __iter__, from a seed and the epoch that set_epoch gives: "
                "random.Random(1000 * seed + self.epoch); or draw from torch's global generator there; or write "
                "ids(epoch, start, stop): see 'A custom sampler' in docs/data.md",
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

        # All that the sampler may draw from is seeded: torch's generator, its own one, or the epoch of `set_epoch`.
        with preserve_rng(torch.device("cpu")):
            seed_everything(value)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(value)
            if set_epoch is not None:
                set_epoch(epoch)

            # One that never ends would fill the memory.
            most = max(LONGEST, 100 * self._samples)
            listed = list(islice(iter(self._sampler), most + 1))

        if len(listed) > most:
            raise UserError(
                f"{type(self._sampler).__name__} does not end: it gave more than {most:,} samples for one epoch",
                f"the dataset has {self._samples:,}",
                "let each epoch end, and set epochs or steps",
            )

        return self._checked(listed)

    def _checked(self, listed: list[Any]) -> np.ndarray:
        """Return the list as an array. Raises a UserError unless it has ids of the dataset."""
        try:
            # NumPy's numbers, and tensors of one number, are accepted too.
            ids = np.fromiter(map(index, listed), dtype=np.int64, count=len(listed))
        except TypeError:
            ids = None

        if ids is None or not len(ids):
            raise UserError(
                f"{type(self._sampler).__name__} must give whole numbers, the ids of samples",
                f"it gave {listed[0]!r}" if listed else "it gave nothing",
                "a sampler of batches cannot be used: Lockstep makes the batches, from global_batch and micro_batch",
            )

        check_in_dataset(ids, self._samples, self._sampler)
        return ids
