"""Counts what may happen only so often within an hour: restarts of a job, and dismissals of nodes of one host.

All nodes receive both in the `CoordinatorState`: a node that takes over continues with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lockstep.launch.times import within_last_hour

# How many nodes of a host may be dismissed within an hour. Then no other may join from there: each of them costs all
# ranks a save and a start.
MAX_DISMISSED = 2


@dataclass
class Restarts:
    """The restarts that the limits of a job apply to. Times are those of the coordinator's monotonic clock."""

    # The times of the restarts within the last hour.
    times: list[float] = field(default_factory=list)

    # How many restarts there were since the newest checkpoint, how many of them after a timeout was reached, and the
    # step of that checkpoint.
    in_a_row: int = 0
    timeouts_reached: int = 0
    newest_step: int | None = None

    def shift_clock(self, seconds: float) -> Restarts:
        """Return the same restarts with the times of a clock that is ahead by this many seconds."""
        return replace(self, times=[moment + seconds for moment in self.times])

    def note_checkpoint(self, newest_step: int | None) -> None:
        """Note the step of the newest checkpoint, if one is known. A new checkpoint resets the consecutive counts.

        An earlier step is no progress: the checkpoint after it was damaged, or the run went back.
        """
        if newest_step is None or newest_step == self.newest_step:
            return

        if self.newest_step is None or newest_step > self.newest_step:
            self.in_a_row = self.timeouts_reached = 0

        self.newest_step = newest_step

    def count(self, now: float, reached_timeout: bool = False) -> None:
        """Count a restart. `reached_timeout`: ranks hang, or are slow."""
        self.times = [*within_last_hour(self.times, now), now]
        self.in_a_row += 1
        self.timeouts_reached += reached_timeout

    def recent(self, now: float) -> int:
        """Return how many restarts of the last hour count."""
        return len(within_last_hour(self.times, now))


@dataclass
class Dismissals:
    """The nodes that were dismissed, because they could not import the program or set up their ranks."""

    # Host -> when nodes of it were dismissed, by the coordinator's monotonic clock.
    times: dict[str, list[float]] = field(default_factory=dict)

    def shift_clock(self, seconds: float) -> Dismissals:
        """Return the same dismissals with the times of a clock that is ahead by this many seconds."""
        return Dismissals({host: [moment + seconds for moment in moments] for host, moments in self.times.items()})

    def count(self, host: str, now: float) -> None:
        """Count a node of this host that was dismissed."""
        self.times[host] = [*within_last_hour(self.times.get(host, []), now), now]

    def are_too_many(self, host: str, now: float) -> bool:
        """Return whether a node of this host may not join, because others of it were dismissed."""
        return len(within_last_hour(self.times.get(host, []), now)) >= MAX_DISMISSED
