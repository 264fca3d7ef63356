"""The order to kill all ranks of an attempt, and the wait until they are gone."""

from __future__ import annotations

from lockstep.launch.decisions.next_attempt import NextAttempt
from lockstep.launch.decisions.state import JobState
from lockstep.launch.decisions.status import JobStatus
from lockstep.launch.times import NODES_KILL_S
from lockstep.launch.wire.messages import Kill


class KillOrder:
    """Has all ranks killed. When no node has any left, the job goes on with `NextAttempt`."""

    def __init__(self, state: JobState, next_attempt: NextAttempt):
        self._state = state
        self._next_attempt = next_attempt

        # The nodes that have not reported yet that their ranks are gone.
        self._awaited: set[int] = set()

    def give(self, now: float) -> None:
        """Order every node to kill its ranks."""
        state, attempt = self._state, self._state.attempt
        assert attempt is not None, "there are ranks to kill"

        state.enter(JobStatus.KILL, now + NODES_KILL_S)
        self._awaited = state.nodes_of_attempt
        state.order(Kill(attempt.number))
        self._go_on_if_gone(now)

    def node_gone(self, node: int, now: float) -> None:
        """The ranks of a node are gone: they were killed, or the node is lost."""
        self._awaited.discard(node)
        self._go_on_if_gone(now)

    def _go_on_if_gone(self, now: float) -> None:
        if self._state.status is JobStatus.KILL and not self._awaited:
            self._next_attempt.wait_for_nodes(now)

    @property
    def overdue_nodes(self) -> list[int]:
        """The nodes that have not reported that their killed ranks are gone, when the deadline has passed."""
        return sorted(self._awaited)
