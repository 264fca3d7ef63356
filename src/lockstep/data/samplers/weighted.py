"""Samples drawn by weight, with or without replacement.

With replacement every offset draws by itself, so any of them can be computed directly. Without replacement the samples
of an epoch are first put roughly in order, all at once, and then sorted where a part of the order is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.data.samplers.sampler import OrderCache, SeededSampler, as_numbers, check_whole, uniforms
from lockstep.errors import UserError

BLOCK = 2**16  # clocks that are computed together


@dataclass(eq=False)
class WeightedSampler(SeededSampler):
    """Draws samples with probabilities proportional to their weights.

    With replacement, every offset draws by itself: sample i is expected length x weights[i] / sum(weights) times in an
    epoch. Without replacement, each draw is among the samples that are left in this epoch, so that each occurs at most
    once, and heavy ones come early. A sample of weight 0 is never drawn.
    """

    weights: Any  # (samples,) of at least 0; they need not add up to 1
    length: int | None = None  # draws in an epoch; None: as many as there are samples
    replacement: bool = True
    seed: int | None = None  # None: the run's

    def __post_init__(self) -> None:
        weights = as_numbers(self.weights, "weights")
        self.dataset_length = len(weights)
        self.length = len(weights) if self.length is None else self.length
        self._drawable = np.flatnonzero(weights)
        self._check(weights)

        # Only samples that can be drawn. Their weights are divided by a power of 2, which rounds nothing: sums of huge
        # weights and quotients of tiny ones stay finite.
        weights = weights[self._drawable]
        self._weights = np.ldexp(weights, -np.frexp(weights.max())[1])

        # The upper bound of each one's interval of [0, total).
        self._bounds = np.cumsum(self._weights)
        self._orders = OrderCache()

    def __len__(self) -> int:
        assert self.length is not None
        return self.length

    def ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= len(self)
        if not self.replacement:
            order = self._orders.get(epoch, lambda: _Order(self._clocks(epoch)))
            return self._drawable[order.part(start, stop)]

        # A draw is the place of a uniform number among the cumulated weights.
        draws = uniforms(self.key("weighted", epoch), start, stop) * self._bounds[-1]
        places = np.searchsorted(self._bounds, draws, side="right")

        # The product above may round up to the total.
        return self._drawable[np.minimum(places, len(self._drawable) - 1)]

    def _clocks(self, epoch: int) -> np.ndarray:
        """Return when the clock of each sample rings in an epoch without replacement.

        The first of several exponential clocks to ring, with the weights as rates, is a draw by weight; so is the next
        one among the rest. So samples are drawn in the order of their clocks.
        """
        key = self.key("weighted", epoch)
        clocks = np.empty_like(self._weights)

        # In blocks that stay in the processor's cache, which is several times as fast. No clock is -0.
        for start in range(0, len(clocks), BLOCK):
            weights = self._weights[start : start + BLOCK]
            draws = uniforms(key, start, start + len(weights))
            clocks[start : start + BLOCK] = np.log1p(-draws) / -weights

        return clocks

    def _check(self, weights: np.ndarray) -> None:
        """Refuse draws that are not possible."""
        if not len(self._drawable):
            raise UserError("all weights are 0, so no sample can be drawn", "", "give some samples a weight above 0")

        assert self.length is not None
        check_whole(self.length, "length")
        if not self.replacement and self.length > len(self._drawable):
            raise UserError(
                f"{self.length} draws without replacement need as many samples with a weight above 0",
                f"{len(self._drawable)} of {len(weights)} samples have one",
                f"set length={len(self._drawable)} or less, or replacement=True",
            )


class _Order:
    """The order of clocks, as `np.argsort(clocks, kind="stable")` has it, without sorting all of them at once.

    Clocks are divided into up to 2^16 buckets that follow each other. A bucket is sorted when a place in it is needed.
    """

    def __init__(self, clocks: np.ndarray):
        self._clocks = clocks

        # The bits of floats from 0 on are in the order of their values: the first 16 that differ make the buckets.
        bits = clocks.view(np.uint64)
        lowest = int(bits.min())
        highest = int(bits.max())
        shift = max(0, (highest - lowest).bit_length() - 16)
        buckets = ((bits - np.uint64(lowest)) >> np.uint64(shift)).astype(np.uint16)

        self._order = np.argsort(buckets, kind="stable")  # the keys have 16 bits, so numpy sorts by counting
        self._ends = np.cumsum(np.bincount(buckets))
        self._is_sorted = np.zeros(len(self._ends), dtype=bool)

    def part(self, start: int, stop: int) -> np.ndarray:
        """Return the places from `start` to before `stop`: indices of clocks."""
        # The buckets that hold them, and where these begin and end.
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop, side="left"))

        # Sort them if one of them is not sorted yet. All together, since the buckets are in order.
        if start < stop and not self._is_sorted[first : last + 1].all():
            places = slice(int(self._ends[first - 1]) if first else 0, int(self._ends[last]))
            indices = self._order[places]
            self._order[places] = indices[np.argsort(self._clocks[indices], kind="stable")]
            self._is_sorted[first : last + 1] = True

        return self._order[start:stop]
