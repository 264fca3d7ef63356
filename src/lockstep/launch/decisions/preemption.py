"""Signals that ask the job to save and exit."""

from __future__ import annotations

import math

from lockstep.errors import Preempted

# A SIGINT at another node within this time is the same Ctrl-C: some tools send it to all nodes.
SAME_SIGINT_S = 1.0


class PreemptRequest:
    """Whether the job was asked to save and exit, and by which signal. `inherited` came before a takeover."""

    def __init__(self, inherited: str | None):
        # The first signal. From then on no attempt is started.
        self.signal = inherited

        # When Ctrl-C was first typed, and the nodes that have received it; after a takeover the nodes are not known.
        self._sigint_at = -math.inf if inherited == "SIGINT" else math.inf
        self._sigint_nodes: set[int] = set()

    def note(self, signal: str, node: int, now: float) -> bool:
        """Note a signal at a node. Return whether it is a second Ctrl-C; one that was sent to all nodes counts once."""
        self.signal = self.signal or signal

        # Schedulers send SIGTERM more than once, so a second SIGTERM means nothing new.
        if signal != "SIGINT":
            return False

        is_second = node in self._sigint_nodes or now - self._sigint_at >= SAME_SIGINT_S
        self._sigint_nodes.add(node)
        self._sigint_at = min(self._sigint_at, now)
        return is_second

    @property
    def exit_code(self) -> int:
        return Preempted.code_of(self.signal)
