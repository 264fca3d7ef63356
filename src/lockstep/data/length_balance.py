"""Divides the samples of a step into micro-batches by length, so that all take about as long.

A micro-batch is padded to its longest sample, so its cost is (number of samples) x (length of the longest). The
division depends on the samples and on the number of micro-batches, never on the rank.
"""

from __future__ import annotations

from heapq import heappop, heappush
from operator import itemgetter

import numpy as np

from lockstep.data.samplers.sampler import as_numbers
from lockstep.errors import UserError

HALVINGS = 40  # times that the search for the best budget halves its interval: enough for float64


def divide_by_length(lengths: np.ndarray, count: int) -> list[np.ndarray]:
    """Return `count` groups of places in `lengths` (samples,), such that the largest cost is as small as possible.

    A group holds samples of similar lengths: many short ones, or a few long ones. If there are too few samples for
    equal costs, expensive and cheap groups alternate, since ranks get contiguous ranges.
    """
    assert 0 < count <= len(lengths)

    # In this order the first sample of a group sets its cost. Stable, so that all ranks have the same order.
    longest_first = np.argsort(-lengths, kind="stable")

    # A sample costs something, even if its length is 0.
    descending = np.maximum(lengths[longest_first], 1e-9)

    # The smallest budget with which no more than `count` groups are needed.
    low = 0.0
    high = float(descending[0]) * len(lengths)  # all samples in one group
    for _ in range(HALVINGS):
        budget = (low + high) / 2
        if len(_group_ends(descending, budget, count)) <= count:
            high = budget
        else:
            low = budget

    # With that budget there may be fewer groups than micro-batches.
    sizes = np.diff([0, *_group_ends(descending, high, count)]).tolist()
    bounds = np.cumsum(_split(descending, sizes, count))[:-1]
    groups = np.split(longest_first, bounds)

    # The most expensive, the cheapest, the second most expensive, the second cheapest, ...
    costs = [-len(group) * lengths[group[0]] for group in groups]
    by_cost = np.argsort(costs, kind="stable")
    alternating = np.stack([by_cost, by_cost[::-1]], axis=1).flatten()[:count]
    return [groups[index] for index in alternating]


def _group_ends(descending: np.ndarray, budget: float, most: int) -> list[int]:
    """Return where groups end if each is filled up to `budget`. Stop when there are more than `most`."""
    ends = [0]
    while ends[-1] < len(descending) and len(ends) <= most + 1:
        # The first sample of a group is its longest.
        size = max(1, int(budget / descending[ends[-1]]))
        ends.append(min(ends[-1] + size, len(descending)))

    return ends[1:]


def _split(descending: np.ndarray, sizes: list[int], count: int) -> list[int]:
    """Return the sizes of exactly `count` groups: the most expensive ones are halved until there are enough."""
    # A heap of (minus the cost, first sample, size). A single sample cannot be halved, so it costs nothing here.
    groups: list[tuple[float, int, int]] = []

    def push(start: int, size: int) -> None:
        cost = size * float(descending[start]) if size > 1 else 0.0
        heappush(groups, (-cost, start, size))

    for start, size in zip(np.cumsum([0, *sizes]).tolist(), sizes, strict=False):
        push(start, size)

    # There are at least as many samples as groups, so a group of two or more is left as long as this runs.
    while len(groups) < count:
        _, start, size = heappop(groups)
        push(start, size // 2)
        push(start + size // 2, size - size // 2)

    # Back in the order of the samples.
    return [size for _, _, size in sorted(groups, key=itemgetter(1))]


def check_lengths(lengths: object, samples: int) -> np.ndarray:
    """Return the lengths of all samples (samples,) as float64, or raise if some or all of them are missing."""
    if lengths is None:
        raise UserError(
            "data.balance=length needs the length of each sample",
            "the training data has none",
            "return Sampled(dataset, lengths=[...]) from data(), or pass it to run.steps",
        )

    numbers = as_numbers(lengths, "lengths")
    if len(numbers) != samples:
        raise UserError(
            f"there are {len(numbers)} lengths for {samples} samples", "", "pass one length for each sample"
        )

    return numbers
