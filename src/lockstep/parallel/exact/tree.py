"""The one order in which the gradients of a step's micro-batches are added, on any number of ranks.

The result of a floating-point sum depends on the order of the additions. So the order is fixed: a binary tree over the
micro-batches 0 .. V-1 of the step, which grows like a binary counter as they are pushed one after another. Two
neighbouring sums over equally many micro-batches are added to one sum; the sums that remain at the end are added from
the smallest up.

    V = 6      0   1   2   3   4   5
                \\ /     \\ /     \\ /
                 +       +       +
                  \\     /       /
                     +         /
                       \\      /
                          +

A rank with a range of micro-batches does all additions inside this range, and is left with the sums of a few subtrees.
Pushing these partial sums of all ranks in order gives the same tree. This module only defines the order: it adds values
of any type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Subtree(NamedTuple):
    """The 2**level micro-batches that begin with `start`, which is a multiple of 2**level."""

    start: int
    level: int

    def completes(self, left: Subtree) -> bool:
        """Whether `left` and this subtree are the two halves of a larger one."""
        return (
            left.level == self.level
            and left.start + (1 << self.level) == self.start
            and (left.start >> left.level) % 2 == 0
        )


class TreeSum(Generic[T]):
    """Adds values, pushed in order, along the tree. `add(left, right)` may change and return `left`."""

    def __init__(self, add: Callable[[T, T], T]):
        self.add = add
        self.partial_sums: list[tuple[Subtree, T]] = []  # in order; no two of them can be added yet

    def clear(self) -> None:
        self.partial_sums.clear()

    def push(self, subtree: Subtree, value: T) -> None:
        """Push the sum `value` of a subtree, which must follow the subtrees pushed so far."""
        # As a binary counter carries.
        while self.partial_sums and subtree.completes(self.partial_sums[-1][0]):
            left, before = self.partial_sums.pop()
            subtree = Subtree(left.start, left.level + 1)
            value = self.add(before, value)

        self.partial_sums.append((subtree, value))

    def finish(self) -> T:
        """Return the sum of everything that was pushed, and clear the tree."""
        assert self.partial_sums[0][0].start == 0, "the tree begins with micro-batch 0"

        # The remaining subtrees get smaller from left to right. The smallest are added first.
        _, total = self.partial_sums.pop()
        while self.partial_sums:
            total = self.add(self.partial_sums.pop()[1], total)

        return total


def subtrees_of(first: int, stop: int) -> list[Subtree]:
    """Return the subtrees that remain after all additions among micro-batches first .. stop - 1."""
    subtrees = []
    while first < stop:
        # The largest subtree that begins at `first` and fits; its size must divide `first`.
        level = (stop - first).bit_length() - 1
        if first:
            level = min(level, (first & -first).bit_length() - 1)

        subtrees.append(Subtree(first, level))
        first += 1 << level

    return subtrees
