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

A rank with a range of micro-batches does all additions inside this range, and is left with the roots of a few subtrees.
Pushing the roots of all ranks in order gives the same tree. This module only defines the order: it adds values of any
type.
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
        self.roots: list[tuple[Subtree, T]] = []  # subtrees in order; no two of them can be added yet

    def push(self, subtree: Subtree, value: T) -> None:
        """Push the sum `value` of a subtree, which must follow the subtrees pushed so far."""
        # As a binary counter carries.
        while self.roots and subtree.completes(self.roots[-1][0]):
            left, before = self.roots.pop()
            subtree = Subtree(left.start, left.level + 1)
            value = self.add(before, value)

        self.roots.append((subtree, value))

    def finish(self) -> T:
        """Return the sum of everything that was pushed, and clear the tree."""
        assert self.roots[0][0].start == 0, "the tree begins with micro-batch 0"

        # The remaining roots get smaller from left to right. The smallest are added first.
        _, total = self.roots.pop()
        while self.roots:
            total = self.add(self.roots.pop()[1], total)

        return total


def roots_of(first: int, stop: int) -> list[Subtree]:
    """Return the roots that remain after all additions among micro-batches first .. stop - 1."""
    roots = []
    while first < stop:
        # The largest subtree that begins at `first` and fits; its size must divide `first`.
        level = (stop - first).bit_length() - 1
        if first:
            level = min(level, (first & -first).bit_length() - 1)

        roots.append(Subtree(first, level))
        first += 1 << level

    return roots
