"""Which sample comes when: a pure function of (seed, epoch, length), in O(1) memory.

A permutation of a billion ids is never stored. A keyed Feistel network permutes the next larger power of four,
and ids that fall outside the dataset walk on along their cycle until they fall inside it, which is again a
permutation. Any position of any epoch can be asked for at once, so resuming costs nothing.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from lockstep.runtime.seeds import derive

BLOCK = 4096  # positions permuted at a time: one numpy pass serves many steps
ROUNDS = 8


class SampleOrder:
    def __init__(self, length: int, seed: int, shuffle: bool = True):
        assert length > 0
        self.length, self.seed, self.shuffle = length, seed, shuffle
        self._half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
        self._block = lru_cache(maxsize=2)(self._make_block)

    def ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Sample ids at positions [start, stop) of `epoch`, as int64."""
        assert 0 <= start <= stop <= self.length
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        first, last = start // BLOCK, max(start, stop - 1) // BLOCK
        blocks = [self._block(epoch, index) for index in range(first, last + 1)]
        joined = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        return joined[start - first * BLOCK : stop - first * BLOCK]

    def _make_block(self, epoch: int, index: int) -> np.ndarray:
        positions = np.arange(index * BLOCK, min((index + 1) * BLOCK, self.length), dtype=np.uint64)
        keys = [np.uint64(derive(self.seed, "order", epoch, r)) for r in range(ROUNDS)]
        ids = self._feistel(positions, keys)
        outside = ids >= self.length
        while outside.any():  # at most 3 of 4 ids are outside, so this ends after a few short passes
            ids[outside] = self._feistel(ids[outside], keys)
            outside = ids >= self.length
        return ids.astype(np.int64)

    def _feistel(self, values: np.ndarray, keys: list[np.uint64]) -> np.ndarray:
        bits = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return (left << bits) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """A 64-bit finaliser (xor-shift and multiply): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    x = (x ^ (x >> np.uint64(29))) * np.uint64(0xA0761D6478BD642F)
    return x ^ (x >> np.uint64(32))
