"""The one order in which the gradients of a step's micro-batches are added, whoever computed them.

Floating-point sums depend on their order, so it is fixed: a binary tree over the micro-batches 0 .. V-1 of the step.
It is what a binary counter does when they are pushed one after another. Two neighbours of one size become one of twice
the size; what is left at the end is added from the smallest up.

    V = 6      0   1   2   3   4   5
                \\ /     \\ /     \\ /
                 +       +       +
                  \\     /       /
                     +         /
                       \\      /
                          +

A rank that has a range of micro-batches can do all additions inside it, and is left with the roots of a few subtrees.
The roots of all ranks, pushed in order, end in the very same tree. Pure arithmetic: values are anything that can be
added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Span(NamedTuple):
    """A subtree: the 2**level micro-batches from `start` on. `start` is a multiple of their number."""

    start: int
    level: int

    def completes(self, left: Span) -> bool:
        """Whether `left` and this are the two halves of one larger subtree."""
        same = left.level == self.level and left.start + (1 << self.level) == self.start
        return same and (left.start >> left.level) % 2 == 0

    def joined(self, left: Span) -> Span:
        return Span(left.start, left.level + 1)


class Counter(Generic[T]):
    """Adds values that come in order, along the tree. `add(left, right)` may change and return `left`."""

    def __init__(self, add: Callable[[T, T], T]):
        self.add = add
        self.roots: list[tuple[Span, T]] = []  # in order; no two of them could be added

    def push(self, span: Span, value: T) -> None:
        while self.roots and span.completes(self.roots[-1][0]):
            left, before = self.roots.pop()
            span, value = span.joined(left), self.add(before, value)
        self.roots.append((span, value))

    def finish(self) -> T:
        """The sum of everything from micro-batch 0 on; the counter is empty again."""
        roots, self.roots = self.roots, []
        assert roots[0][0].start == 0, "the sum of a part has no place in the tree"
        _, total = roots.pop()
        while roots:
            total = self.add(roots.pop()[1], total)
        return total


def roots_of(first: int, stop: int) -> list[Span]:
    """What is left of micro-batches [first, stop) when all additions inside the range have been done."""
    found = []
    while first < stop:
        level = (stop - first).bit_length() - 1
        if first:
            level = min(level, (first & -first).bit_length() - 1)  # how far `first` can be halved
        found.append(Span(first, level))
        first += 1 << level
    return found
