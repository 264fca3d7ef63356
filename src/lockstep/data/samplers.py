"""Samplers: the sample at each offset of an epoch is a pure function of (epoch, offset).

A sampler has no state and does not depend on the rank. Any offset of any epoch can be computed directly, so the state
of a run's data is one integer, resuming costs nothing, and every offset is trained exactly once on any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lockstep.runtime.seeds import derive

BLOCK = 4096  # offsets that are permuted at once, with one numpy call for many steps
ROUNDS = 8  # rounds of the Feistel network


@runtime_checkable
class Sampler(Protocol):
    """Chooses samples. An id may occur several times in an epoch, or never; every *offset* occurs once."""

    def __len__(self) -> int:
        """Return the number of offsets in an epoch."""

    def ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return the sample ids (int64) at offsets [start, stop) of an epoch. It must be a pure function."""


@dataclass(frozen=True)
class Sampled:
    """A dataset with a sampler: `Task.data` may return it in place of the dataset.

    Its items are those of the dataset, and its length is the number of offsets in the sampler's epoch.
    """

    dataset: Any
    sampler: Sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


@dataclass(frozen=True)
class SequentialSampler:
    """The samples 0, 1, ... `length` - 1, in this order."""

    length: int

    def __len__(self) -> int:
        return self.length

    def ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.length
        return np.arange(start, stop, dtype=np.int64)


class ShuffledSampler:
    """Every sample once per epoch, in an order that depends on (seed, epoch, length), in O(1) memory.

    The permutation is never stored. A keyed Feistel network permutes the integers below the next power of four; a
    result past the end of the dataset is permuted again until it falls inside ("cycle walking"). What remains is a
    permutation of the dataset.
    """

    def __init__(self, length: int, seed: int):
        assert length > 0
        self.length = length
        self.seed = seed

        # A Feistel network needs two halves of equal width, hence a power of four.
        self._half_bits = max(1, ((length - 1).bit_length() + 1) // 2)

        # One cache per instance: `lru_cache` on the method would keep all instances alive.
        self._block = lru_cache(maxsize=2)(self._make_block)

    def __len__(self) -> int:
        return self.length

    def ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.length

        # Consecutive micro-batches usually lie in the same block, which is cached.
        first = start // BLOCK
        last = max(start, stop - 1) // BLOCK
        block = self._block(epoch, first)
        if last > first:
            block = np.concatenate([block, *(self._block(epoch, index) for index in range(first + 1, last + 1))])

        # A copy: the caller may change it, and the block stays in the cache.
        return block[start - first * BLOCK : stop - first * BLOCK].copy()

    def _make_block(self, epoch: int, index: int) -> np.ndarray:
        offsets = np.arange(index * BLOCK, min((index + 1) * BLOCK, self.length), dtype=np.uint64)
        keys = [np.uint64(derive(self.seed, "order", epoch, r)) for r in range(ROUNDS)]
        ids = self._feistel(offsets, keys)

        # At most 3 of 4 ids are outside the dataset, so this ends after a few passes.
        outside = ids >= self.length
        while outside.any():
            ids[outside] = self._feistel(ids[outside], keys)
            outside = ids >= self.length

        return ids.astype(np.int64)

    def _feistel(self, values: np.ndarray, keys: list[np.uint64]) -> np.ndarray:
        """Permute uint64 values below the power of four, with one key per round.

        A round xors one half of the bits with a function of the other half. This can be undone, so it is a permutation
        for any function.
        """
        bits = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left = values >> bits
        right = values & mask

        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)

        return (left << bits) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """Scramble 64 bits by xor-shifts and multiplications: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    x = (x ^ (x >> np.uint64(29))) * np.uint64(0xA0761D6478BD642F)
    return x ^ (x >> np.uint64(32))


def make_sampler(length: int, seed: int, shuffle: bool = True) -> Sampler:
    return ShuffledSampler(length, seed) if shuffle else SequentialSampler(length)
