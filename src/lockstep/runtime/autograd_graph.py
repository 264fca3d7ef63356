"""The graph of autograd: what a backward would visit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def autograd_nodes(starts: Iterable[Any]) -> Iterator[Any]:
    """Yield once each node that a backward from the nodes `starts` visits, these included. None has no graph."""
    # With an explicit stack, because graphs of deep or recurrent models exceed Python's recursion limit.
    pending = list(starts)
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue

        seen.add(node)
        yield node
        pending.extend(following for following, _ in node.next_functions)
