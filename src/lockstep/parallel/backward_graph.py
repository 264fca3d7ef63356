"""What a backward comes to, read from the graph before it runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def nodes_below(starts: Iterable[Any]) -> set[Any]:
    """The nodes that a backward from the nodes `starts` comes to, these included."""
    left = list(starts)
    seen = set(left)
    while left:
        below = {after for after, _ in left.pop().next_functions if after is not None} - seen
        seen |= below
        left.extend(below)
    return seen


def leaves_below(starts: Iterable[Any]) -> list[Tensor]:
    """The tensors that it gives a gradient to: those that the graph begins with."""
    return [node.variable for node in nodes_below(starts) if type(node).__name__ == "AccumulateGrad"]
