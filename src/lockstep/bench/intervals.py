"""Medians with confidence intervals, of turns that were measured in alternation.

Noise on a machine is not normal: most of it is outliers to one side. So no formula here assumes a distribution, and a
mean is never taken.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import TypedDict

LEVEL = 0.95
ENOUGH = 6  # values: fewer have no interval at this level, not even their whole range


class Estimate(TypedDict):
    """A median and its confidence interval, or the range of the values if there are fewer than ENOUGH.

    It is a plain dict, as results.json holds it.
    """

    median: float
    low: float
    high: float
    count: int  # the number of measurements


def estimate(values: Sequence[float]) -> Estimate:
    """Return the median of `values` with its confidence interval; below ENOUGH values, with their range.

    The interval goes from the k-th smallest value to the k-th largest one. It misses the true median only if fewer than
    k values lie on one side of it: a binomial probability, whatever the distribution of the values is.
    """
    ordered = sorted(values)
    count = len(ordered)

    # Cut as many values off each end as the level allows.
    cut = 0
    if count >= ENOUGH:
        while _chance_of_missing(cut + 1, count) <= 1 - LEVEL:
            cut += 1

    return Estimate(median=statistics.median(ordered), low=ordered[cut], high=ordered[-1 - cut], count=count)


def _chance_of_missing(cut: int, count: int) -> float:
    """Return the chance that at most `cut` of `count` values lie below the true median, or above it."""
    ways = sum(math.comb(count, below) for below in range(cut + 1))
    return 2 * ways / 2**count


def spread_text(count: int) -> str:
    """Return the name of the spread of an estimate of `count` rounds."""
    if count < 2:
        return "a single round, so nothing is known about the noise"
    if count < ENOUGH:
        return f"medians with the range of {count} rounds"
    return "medians with 95 % confidence intervals"


def ratio(
    these: Sequence[float], those: Sequence[float], scale: Callable[[float], float] = lambda value: value
) -> Estimate:
    """Return the median of the ratios of each round: noise that lasts for a round hits both of its turns alike."""
    return estimate([scale(this / that) for this, that in zip(these, those, strict=True)])
