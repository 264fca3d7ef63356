"""The protocol of samplers, `Sampled` (a dataset together with one), and what samplers share.

A sampler is a pure function from (epoch, offset) to the id of a sample. That is why a run can resume anywhere, on any
number of ranks: a position is all that has to be saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from lockstep.errors import UserError
from lockstep.runtime.seeds import derive


@runtime_checkable
class Sampler(Protocol):
    """Chooses samples. An id may occur several times in an epoch, or never; every *offset* occurs once.

    A sampler may also have `with_seed(seed)`, which returns the sampler that the run uses, and `dataset_length`,
    of the dataset that it is made for.
    """

    def __len__(self) -> int:
        """Return the number of offsets in an epoch."""

    def ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return the sample ids (int64) at offsets [start, stop) of an epoch. It must be a pure function."""


@dataclass(frozen=True)
class Sampled:
    """A dataset with a sampler: `Task.data` may return it in place of the dataset.

    Its items are those of the dataset, and its length is the number of offsets in the sampler's epoch.

    sampler   a `Sampler`, or a torch sampler; None: shuffled, unless data.shuffle=false
    lengths   (samples,) the length of each sample, for data.balance; None: those of the sampler, if it has any
    """

    dataset: Any
    sampler: Any = None
    lengths: Sequence[int] | np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.dataset if self.sampler is None else self.sampler)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    @property
    def known_lengths(self) -> Any:
        """The length of each sample (samples,), or None if neither this nor the sampler has them."""
        return getattr(self.sampler, "lengths", None) if self.lengths is None else self.lengths


class SeededSampler:
    """A sampler that uses the run's seed, unless it was made with a seed of its own. For dataclasses."""

    seed: int | None

    def with_seed(self, seed: int) -> Self:
        """Return this sampler with the run's `seed`."""
        return self if self.seed is not None else replace(self, seed=seed)  # pyrefly: ignore

    def key(self, stream: str, *keys: int) -> int:
        """Return a 63-bit key that is a pure function of the seed and the arguments."""
        if self.seed is None:
            raise UserError(
                f"{type(self).__name__} has no seed",
                "a run passes its own seed; outside of a run there is none",
                f"pass one: {type(self).__name__}(..., seed=0)",
            )

        return derive(self.seed, stream, *keys)


def checked_ids(sampler: Sampler, epoch: int, start: int, stop: int, samples: int) -> np.ndarray:
    """Return the ids at these offsets (int64), or raise unless each is a sample of a dataset of `samples` samples.

    A user's sampler may be wrong. With too few ids the step would have the wrong weight, and an id of -1 would silently
    read the last item of a list.
    """
    ids = np.asarray(sampler.ids(epoch, start, stop))
    if ids.shape != (stop - start,) or ids.dtype.kind not in "iu":
        raise UserError(
            f"{type(sampler).__name__}.ids(epoch={epoch}, start={start}, stop={stop}) must give {stop - start} whole "
            "numbers, one for each offset",
            f"an array of shape {ids.shape} and type {ids.dtype}",
            "return np.array([...], dtype=np.int64), with stop - start ids",
        )

    ids = ids.astype(np.int64, copy=False)
    check_in_dataset(ids, samples, sampler, f"in epoch {epoch}, at offsets {start} to {stop}")
    return ids


def check_in_dataset(ids: np.ndarray, samples: int, sampler: Any, found: str = "") -> None:
    """Raise unless each of these int64 ids from `sampler` is that of a sample: from 0 to `samples` - 1."""
    # As unsigned numbers, negative ones are larger than any other: one comparison finds both kinds of mistakes.
    if len(ids) and not ids.view(np.uint64).max() < samples:
        raise UserError(
            f"{type(sampler).__name__} gave sample {ids.max() if ids.min() >= 0 else ids.min()} of a dataset of "
            f"{samples} samples",
            found,
            "make the sampler for this dataset",
        )


def mix(x: np.ndarray) -> np.ndarray:
    """Scramble 64 bits by xor-shifts and multiplications: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    x = (x ^ (x >> np.uint64(29))) * np.uint64(0xA0761D6478BD642F)
    return x ^ (x >> np.uint64(32))


def uniforms(key: int, start: int, stop: int) -> np.ndarray:
    """Return float64 numbers in [0, 1), uniform, one for each integer of [start, stop): a pure function of each."""
    # The key goes in twice: neighbouring keys would otherwise give the same numbers at other places.
    numbers = np.arange(start, stop, dtype=np.uint64)
    bits = mix(mix(numbers ^ np.uint64(key)) ^ np.uint64(key))

    # A float64 holds 53 bits.
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def as_numbers(values: Any, what: str, minimum: float = 0.0, each: str = "sample") -> np.ndarray:
    """Return `values` as float64 (n,), or raise if they are not finite numbers of at least `minimum`."""
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{what} must be numbers, one for each {each}", str(error), f"pass {what} as numbers") from None

    if numbers.ndim != 1 or len(numbers) == 0:
        raise UserError(
            f"{what} must be a list with one number for each {each}",
            f"an array of shape {numbers.shape}",
            f"pass a one-dimensional list or array of {what}",
        )

    wrong = np.flatnonzero(~(np.isfinite(numbers) & (numbers >= minimum)))
    if len(wrong):
        raise UserError(
            f"{what} of {each} {wrong[0]} must be a finite number of at least {minimum:g}; it is {numbers[wrong[0]]}",
            f"{len(wrong)} of {len(numbers)} are wrong" if len(wrong) > 1 else "",
            f"correct it, or leave the {each} out",
        )

    return numbers


def check_whole(value: Any, name: str) -> None:
    """Raise unless an option of a sampler is a whole number of at least 1."""
    if not isinstance(value, int | np.integer) or value < 1:
        raise UserError(f"{name}={value} must be a whole number of at least 1", "", f"set {name}=64")
