"""Samples drawn by weight, with or without replacement.

With replacement every offset draws by itself, so any of them can be computed directly. Without replacement the order of
an epoch is made at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.data.samplers.sampler import SeededSampler, as_numbers, check_whole, uniforms
from lockstep.data.samplers.shuffled import OrderCache
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
            order = self._orders.get(epoch, lambda: _order(self._clocks(epoch)))
            return self._drawable[order[start:stop]]

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


def _order(clocks: np.ndarray) -> np.ndarray:
    """Return `np.argsort(clocks, kind="stable")`: equal clocks are in the order of their samples on every machine."""
    # Equal clocks are rare, and without them the sort that is not stable gives the same, in half the time.
    in_order = np.sort(clocks)
    has_ties = (in_order[1:] == in_order[:-1]).any()
    return np.argsort(clocks, kind="stable" if has_ties else None)
