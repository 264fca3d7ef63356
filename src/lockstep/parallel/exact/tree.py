"""The one order in which the gradients of a step's micro-batches are added, on any number of ranks.

Floating-point sums depend on their order, so it is fixed: a binary tree over the micro-batches 0 .. V-1 of the step,
which grows like a binary counter when they are pushed one after another. Two neighbouring sums of the same size become
one of twice the size; the sums that are left at the end are added from the smallest up.

    V = 6      0   1   2   3   4   5
                \\ /     \\ /     \\ /
                 +       +       +
                  \\     /       /
                     +         /
                       \\      /
                          +

A rank that has a range of micro-batches can do all additions inside it, and is left with the roots of a few subtrees.
The roots of all ranks, pushed in order, give the same tree. This module is pure arithmetic: it adds values of any type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Subtree(NamedTuple):
    """The 2**level micro-batches from `start` on. `start` is a multiple of their number."""

    start: int
    level: int

    def completes(self, left: Subtree) -> bool:
        """Whether `left` and this are the two halves of one larger subtree."""
        return (
            left.level == self.level
            and left.start + (1 << self.level) == self.start
            and (left.start >> left.level) % 2 == 0
        )


class TreeSum(Generic[T]):
    """Adds values, pushed in order, along the tree. `add(left, right)` may change and return `left`."""

    def __init__(self, add: Callable[[T, T], T]):
        self.add = add
        self.roots: list[tuple[Subtree, T]] = []  # in order; no two of them can be added yet

    def push(self, subtree: Subtree, value: T) -> None:
        """Add the sum of a subtree, the next one after those pushed before."""
        # Like the carry of a binary counter.
        while self.roots and subtree.completes(self.roots[-1][0]):
            # The left one first: add() may keep its memory.
            left, before = self.roots.pop()
            subtree = Subtree(left.start, left.level + 1)
            value = self.add(before, value)

        self.roots.append((subtree, value))

    def finish(self) -> T:
        """Return the sum of everything from micro-batch 0 on and start empty again."""
        assert self.roots[0][0].start == 0, "the tree begins with micro-batch 0"

        # The sums that are left have different sizes; the smallest, which come last, are added first.
        _, total = self.roots.pop()
        while self.roots:
            total = self.add(self.roots.pop()[1], total)

        return total


def roots_of(first: int, stop: int) -> list[Subtree]:
    """Return the subtrees that are left when all additions inside micro-batches [first, stop) are done."""
    roots = []
    while first < stop:
        # The largest subtree that begins at `first` and fits: its size must divide `first`.
        level = (stop - first).bit_length() - 1
        if first:
            level = min(level, (first & -first).bit_length() - 1)

        roots.append(Subtree(first, level))
        first += 1 << level

    return roots
