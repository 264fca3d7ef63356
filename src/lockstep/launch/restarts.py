"""The restarts of a job so far: how many there were, how many without a new checkpoint, and what caused them.

All nodes receive them in the `CoordinatorState`: a node that takes over continues with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.launch.times import within_last_hour

# How many times nodes of a host are dismissed within an hour before no other may join from there: each of them costs
# all ranks a save and a start.
MAX_DISMISSED = 2


@dataclass
class Restarts:
    """Counts the restarts that count for the limits. Times are those of the coordinator's monotonic clock."""

    # When they were, within the last hour.
    times: list[float] = field(default_factory=list)

    # How many have followed each other since the newest checkpoint, how many of them followed a hang, and its step.
    in_a_row: int = 0
    hangs: int = 0
    newest: int | None = None

    # Host -> when nodes of it were dismissed, because they could not import the program or set up their ranks.
    dismissed: dict[str, list[float]] = field(default_factory=dict)

    def by_another_clock(self, ahead: float) -> Restarts:
        """Return the same restarts with the times of a clock that is `ahead` by this many seconds."""
        times = [moment + ahead for moment in self.times]
        dismissed = {host: [moment + ahead for moment in moments] for host, moments in self.dismissed.items()}
        return Restarts(times, self.in_a_row, self.hangs, self.newest, dismissed)

    def note_checkpoint(self, newest: int | None) -> None:
        """Note the step of the newest checkpoint, if one is known. A new one begins a new row."""
        if newest not in (None, self.newest):
            self.newest, self.in_a_row, self.hangs = newest, 0, 0

    def count(self, now: float, hang: bool = False) -> None:
        """Count a restart, after a `hang` or another failure."""
        self.times = [*within_last_hour(self.times, now), now]
        self.in_a_row += 1
        self.hangs += hang

    def recent(self, now: float) -> int:
        """Return how many restarts of the last hour count."""
        return len(within_last_hour(self.times, now))

    def count_dismissed(self, host: str, now: float) -> None:
        """Count a node of this host that was dismissed."""
        self.dismissed[host] = [*within_last_hour(self.dismissed.get(host, []), now), now]

    def has_dismissed(self, host: str, now: float) -> bool:
        """Return whether a node of this host may not join, because others of it were dismissed."""
        return len(within_last_hour(self.dismissed.get(host, []), now)) >= MAX_DISMISSED
