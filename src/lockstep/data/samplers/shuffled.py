"""Every sample once per epoch: in the dataset's order, or shuffled.

The shuffle is a permutation that is computed id by id (a Feistel network), not a list: an epoch of a billion samples
needs no memory, and resuming in its middle takes no time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from lockstep.data.samplers.sampler import Sampler, mix
from lockstep.runtime.seeds import derive

BLOCK = 4096  # offsets that are permuted at once, with one numpy call for many steps
ROUNDS = 8  # rounds of the Feistel network
CACHED = 2  # orders that a sampler keeps: of the epoch in progress, and of the next one, into which workers prefetch

T = TypeVar("T")


class OrderCache:
    """Keeps the last few results of a pure function, such as the order of an epoch."""

    def __init__(self) -> None:
        self._results: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result for `key`, made by `make()` if it is not kept."""
        if key not in self._results:
            # A dict keeps the order of insertion, so its first key is the oldest.
            while len(self._results) >= CACHED:
                del self._results[next(iter(self._results))]

            self._results[key] = make()

        return self._results[key]


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

        self._blocks = OrderCache()

    def __len__(self) -> int:
        return self.length

    def ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.length

        # Consecutive micro-batches usually lie in the same block, which is cached.
        begin = start // BLOCK
        end = max(start, stop - 1) // BLOCK
        block = self._block(epoch, begin)
        if end > begin:
            block = np.concatenate([block, *(self._block(epoch, index) for index in range(begin + 1, end + 1))])

        # A copy: the caller may change it, and the block stays in the cache.
        return block[start - begin * BLOCK : stop - begin * BLOCK].copy()

    def _block(self, epoch: int, index: int) -> np.ndarray:
        return self._blocks.get((epoch, index), lambda: self._make_block(epoch, index))

    def _make_block(self, epoch: int, index: int) -> np.ndarray:
        """Return one block of the permutation. Ids outside the dataset are permuted again until they are inside."""
        # The last block of an epoch may be short. Each epoch has keys of its own.
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
        # The upper and the lower half of the bits.
        bits = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left = values >> bits
        right = values & mask

        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & mask)

        return (left << bits) | right


def make_sampler(length: int, seed: int, shuffle: bool = True) -> Sampler:
    return ShuffledSampler(length, seed) if shuffle else SequentialSampler(length)
