"""Batches of similar lengths, so that padding wastes little.

Samples are shuffled first, then sorted by length within pools of many batches, and the batches of a pool are shuffled
again. So lengths in a batch are similar, and the order of batches stays random.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.data.samplers.sampler import SeededSampler, as_numbers, check_whole
from lockstep.data.samplers.shuffled import OrderCache, ShuffledSampler


@dataclass(eq=False)
class BucketedSampler(SeededSampler):
    """Every sample once per epoch, in groups of `batch` samples that have similar lengths.

    The epoch is shuffled and cut into pools of `pool` groups. A pool is sorted by length and cut into groups, and the
    groups are shuffled. So a group holds other samples in each epoch, and long groups come at any time.
    """

    lengths: Any  # (samples,)
    batch: int  # samples of a group: global_batch, or micro_batch if that is set
    pool: int = 64  # groups that are sorted together; more: less padding, and less random groups
    seed: int | None = None  # None: the run's

    def __post_init__(self) -> None:
        check_whole(self.batch, "batch")
        check_whole(self.pool, "pool")

        self.lengths = as_numbers(self.lengths, "lengths")
        self._shuffled = ShuffledSampler(len(self), self.seed or 0)
        self._pools = OrderCache()

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def dataset_length(self) -> int:
        return len(self.lengths)

    def ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= len(self)

        # Consecutive micro-batches usually lie in the same pool, which is cached.
        size = self.batch * self.pool
        first = start // size
        last = max(start, stop - 1) // size

        pools = [self._pool(epoch, index) for index in range(first, last + 1)]
        return np.concatenate(pools)[start - first * size : stop - first * size]

    def _pool(self, epoch: int, index: int) -> np.ndarray:
        return self._pools.get((epoch, index), lambda: self._make_pool(epoch, index))

    def _make_pool(self, epoch: int, index: int) -> np.ndarray:
        """Return the ids of one pool: in groups of similar length, which come in random order."""
        # This raises without a seed, on which the shuffled order depends as well.
        key = self.key("buckets", epoch, index)

        # The samples of the pool, sorted by length; samples of equal length stay shuffled.
        start = index * self.batch * self.pool
        ids = self._shuffled.ids(epoch, start, min(start + self.batch * self.pool, len(self)))
        ids = ids[np.argsort(self.lengths[ids], kind="stable")]

        # The last pool of an epoch may have a short group. It comes last, so that groups and batches stay aligned, and
        # is cut out anywhere, so that it is not always the samples of one length.
        groups, rest = divmod(len(ids), self.batch)
        cut = key % (groups + 1) * self.batch
        short = ids[cut : cut + rest]

        # The other groups come in any order.
        full = np.delete(ids, np.s_[cut : cut + rest]).reshape(groups, self.batch)
        order = ShuffledSampler(groups, key).ids(0, 0, groups) if groups else []
        return np.concatenate([*full[order], short])
