"""Several datasets, mixed by weight.

The datasets take turns in a fixed pattern that repeats, computed from the weights. No random number decides whose turn
it is, so the shares are exact in every run of consecutive samples, and any offset can be computed directly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset

from lockstep.data.samplers.sampler import Sampled, SeededSampler, as_numbers
from lockstep.data.samplers.torch_samplers import as_sampler
from lockstep.errors import UserError

MAX_PERIOD = 100_000  # offsets after which the pattern of a mixture repeats


class Mixture(Sampled):
    """Datasets with weights: `Task.data` may return it in place of a dataset.

    `Mixture([(books, 3), (web, 1)])` takes three samples of `books` for each one of `web`, evenly spread: in any run
    of consecutive offsets, the count of a dataset differs from its share by less than the number of datasets. A part
    may be a `Sampled`, with a sampler of its own; otherwise it is shuffled.

    Each part has epochs of its own: one begins when the last one has ended, in the middle of the mixture's epoch or
    over several of them. So a part uses all its samples once before any of them again. An epoch of the mixture has
    `length` offsets; None: as many as all parts have together.
    """

    def __init__(self, parts: Sequence[tuple[Any, float]], length: int | None = None, seed: int | None = None):
        if not parts or not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in parts):
            raise UserError(
                "a mixture needs datasets, each with a weight",
                "" if parts else "it has no datasets",
                "pass a list of (dataset, weight)",
            )

        weights = as_numbers([weight for _, weight in parts], "weights", each="dataset")
        if not weights.all():
            raise UserError(
                f"dataset {int(np.argmin(weights))} of a mixture has the weight 0", "", "leave it out of the list"
            )

        # The mixture numbers the samples of all datasets one after the other.
        given = [part if isinstance(part, Sampled) else Sampled(part) for part, _ in parts]
        datasets = [part.dataset for part in given]
        _check_datasets(datasets)

        length = sum(map(len, given)) if length is None else length
        if length < 1:
            raise UserError(f"length={length} leaves a mixture without samples", "", "set length=1 or more")

        sampler = MixtureSampler([part.sampler for part in given], list(map(len, datasets)), weights, length, seed)
        super().__init__(ConcatDataset(datasets), sampler, _joined([part.known_lengths for part in given]))


@dataclass(eq=False)
class MixtureSampler(SeededSampler):
    """Ids in the concatenation of several datasets, each with its sampler. See `Mixture`.

    The pattern of a period says whose turn each offset is, and how many draws of the same dataset come before it in the
    period. So the id at any offset is found by arithmetic, without reading the offsets before it.
    """

    samplers: list[Any]  # None: shuffled
    dataset_lengths: list[int]
    weights: np.ndarray  # (parts,)
    length: int
    seed: int | None = None  # None: the run's

    def __post_init__(self) -> None:
        # How often each part is drawn in one period.
        counts = _counts_in_period(self.weights)
        self._period = int(counts.sum())

        # Draw j of a part is due in the middle of its share of the period. Sorting by that spreads the draws evenly.
        part = np.repeat(np.arange(len(counts)), counts)
        number = np.concatenate([np.arange(count) for count in counts])
        due = (number + 0.5) / counts[part]
        order = np.argsort(due, kind="stable")

        # The pattern of one period.
        self._part = part[order]  # (period,) whose turn it is
        self._number = number[order]  # (period,) how many draws of the same part come before
        self._counts = counts
        self._starts = np.cumsum([0, *self.dataset_lengths])  # the id of each dataset's first sample

        # Each part has a seed of its own: with equal ones, datasets of equal length would be shuffled alike.
        if self.seed is not None:
            pairs = enumerate(zip(self.samplers, self.dataset_lengths, strict=True))
            self.samplers = [as_sampler(sampler, size, self.key("part", index)) for index, (sampler, size) in pairs]

    def __len__(self) -> int:
        return self.length

    def ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.length
        self.key("mixture")  # raises without a seed, from which the parts' seeds are derived

        # The pattern goes on from epoch to epoch, so positions count all epochs.
        positions = np.arange(start, stop, dtype=np.int64) + epoch * self.length
        periods, places = np.divmod(positions, self._period)

        # The part that each position draws from, and the number of that draw among all draws of the part, from 0.
        parts = self._part[places]
        numbers = periods * self._counts[parts] + self._number[places]

        # Part by part: the draws of one part in a range of positions are consecutive.
        ids = np.empty(len(positions), dtype=np.int64)
        for part in np.unique(parts):
            of_part = parts == part
            ids[of_part] = self._starts[part] + self._draws(part, numbers[of_part])

        return ids

    def _draws(self, part: int, numbers: np.ndarray) -> np.ndarray:
        """Return the ids of consecutive draws of a part, counted over all its epochs."""
        length = len(self.samplers[part])
        first = int(numbers[0])
        last = int(numbers[-1])

        # They may reach over the end of one epoch of the part, or of several if it is small.
        pieces = []
        for epoch in range(first // length, last // length + 1):
            start = max(first - epoch * length, 0)
            stop = min(last + 1 - epoch * length, length)
            pieces.append(self.samplers[part].ids(epoch, start, stop))

        return np.concatenate(pieces)


def _counts_in_period(weights: np.ndarray) -> np.ndarray:
    """Return whole numbers in proportion to the weights, exactly if they add up to at most MAX_PERIOD."""
    # As they were typed: Fraction(0.1) would have a denominator of 2^55.
    fractions = [Fraction(str(weight)) for weight in weights.tolist()]
    shares = [fraction / sum(fractions) for fraction in fractions]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MAX_PERIOD:
        return np.array([int(share * period) for share in shares])

    # Such a part would be drawn far more often than its weight says.
    smallest = min(shares)
    if smallest * MAX_PERIOD < 1:
        raise UserError(
            f"dataset {shares.index(smallest)} of a mixture has a share of {float(smallest):.3g}, which is too small",
            f"the pattern of a mixture has {MAX_PERIOD:,} places at most",
            "leave it out of the list, or give it a larger weight",
        )

    # Rounded, so that shares are off by less than one draw in a period.
    return np.array([round(share * MAX_PERIOD) for share in shares])


def _check_datasets(datasets: list[Any]) -> None:
    for index, dataset in enumerate(datasets):
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise UserError(
                f"dataset {index} of a mixture must have __getitem__ and __len__; it is a {type(dataset).__name__}",
                "",
                "mix streams inside one IterableDataset, or use datasets with an index",
            )

        if len(dataset) == 0:
            raise UserError(f"dataset {index} of a mixture is empty", "", "leave it out of the list")


def _joined(lengths: list[Any]) -> np.ndarray | None:
    """Return the lengths of all parts' samples, or None if they are not known for some part."""
    if any(part is None for part in lengths):
        return None
    return np.concatenate([as_numbers(part, "lengths") for part in lengths])
