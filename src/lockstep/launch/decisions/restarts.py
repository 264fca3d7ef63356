"""The restarts of a job so far: how many there were, how many without a new checkpoint, and what caused them.

All nodes receive the `RestartHistory` in the `CoordinatorState`: a node that takes over continues with it.
"""

from __future__ import annotations

from collections import Counter

from lockstep.launch.failure import Failure
from lockstep.launch.times import within_last_hour
from lockstep.launch.wire.messages import HangPoint, RestartHistory

# How many times nodes of a host are sent away within an hour before no other may join from there: each of them costs
# all ranks a save and a start.
MAX_SENT_AWAY = 2


class Restarts:
    """Counts restarts, and remembers what they tell about the next attempt."""

    def __init__(self) -> None:
        self.total = 0

        # The times of the restarts that count for the limits.
        self._times: list[float] = []

        # How many of these followed each other without a new checkpoint, and the step of the newest one at that time.
        self._in_a_row = 0
        self._newest: int | None = None

        # (step, phase) -> how many attempts ended there because no rank advanced.
        self.hang_points: Counter[tuple[int | None, str | None]] = Counter()

        # Host -> when it was sent away, because it could not import the program or set up its ranks.
        self._sent_away: dict[str, list[float]] = {}

    def history(self, now: float) -> RestartHistory:
        """Return what a successor continues with. Times become ages."""
        ages = [now - moment for moment in within_last_hour(self._times, now)]
        points = [HangPoint(step, phase, count) for (step, phase), count in self.hang_points.items()]
        sent_away = {host: [now - moment for moment in times] for host, times in self._sent_away.items()}
        return RestartHistory(self.total, ages, self._in_a_row, self._newest, points, sent_away)

    @classmethod
    def inherited(cls, history: RestartHistory, now: float) -> Restarts:
        """Continue the count of a lost coordinator. Its ages become times of this machine's clock."""
        restarts = cls()
        restarts.total = history.restarts
        restarts._times = [now - age for age in history.recent]
        restarts._in_a_row = history.in_a_row
        restarts._newest = history.newest

        for point in history.hang_points:
            restarts.hang_points[point.step, point.phase] = point.count

        restarts._sent_away = {host: [now - age for age in ages] for host, ages in history.sent_away.items()}
        return restarts

    def recent(self, now: float) -> int:
        """Return how many restarts of the last hour count."""
        return len(within_last_hour(self._times, now))

    def in_a_row(self, newest: int | None) -> int:
        """Return how many restarts that count have followed each other, if `newest` is still the newest checkpoint."""
        return self._in_a_row if newest == self._newest else 0

    def count(self, newest: int | None, now: float, counts: bool = True) -> None:
        """Count a restart from the checkpoint `newest`. `counts`: it counts for the limits."""
        self.total += 1

        if counts:
            self._times.append(now)
            self._in_a_row = self.in_a_row(newest) + 1
            self._newest = newest

    def count_hang(self, failure: Failure) -> None:
        """Count an attempt that was ended as a hang: the next one gets more time at this step and phase."""
        self.hang_points[failure.step, failure.phase] += 1

    def count_sent_away(self, host: str, now: float) -> None:
        """Count a node of this host that was sent away."""
        self._sent_away[host] = [*within_last_hour(self._sent_away.get(host, []), now), now]

    def refuses(self, host: str, now: float) -> bool:
        """Return whether a node of this host may not join, because others of it were sent away."""
        return len(within_last_hour(self._sent_away.get(host, []), now)) >= MAX_SENT_AWAY
