"""Whether a failure is followed by another attempt, and what is remembered from one attempt to the next.

All nodes receive the `RestartHistory` in the `CoordinatorState`: a node that takes over continues with it.
"""

from __future__ import annotations

from collections import Counter

from lockstep.launch.decisions.settings import Settings
from lockstep.launch.failure import Failure, LauncherFailure
from lockstep.launch.times import within_last_hour
from lockstep.launch.wire.messages import Culprit, HangPlace, RestartHistory, Slot

# After this many failures of one rank slot in a row, without a new checkpoint, its node runs one rank fewer, if
# `--nproc` allows it. Which device becomes free is not chosen: the remaining ranks have the lowest local numbers.
TIMES_IN_A_ROW = 3


class Restarts:
    """Counts restarts and decides whether a failure is followed by another attempt."""

    def __init__(self) -> None:
        self.total = 0

        # The times of the restarts that count.
        self._times: list[float] = []

        # One for each of these restarts.
        self._culprits: list[Culprit] = []

        # (step, phase) -> how many attempts ended there because no rank advanced.
        self.hang_places: Counter[tuple[int | None, str | None]] = Counter()

    def history(self, now: float) -> RestartHistory:
        """Return what a successor continues with. Times become ages."""
        ages = [now - moment for moment in within_last_hour(self._times, now)]
        places = [HangPlace(step, phase, count) for (step, phase), count in self.hang_places.items()]

        # Only the last few culprits can still make a streak.
        return RestartHistory(self.total, ages, self._culprits[-TIMES_IN_A_ROW:], places)

    @classmethod
    def inherited(cls, history: RestartHistory, now: float) -> Restarts:
        """Continue the count of a lost coordinator. Its ages become times of this machine's clock."""
        restarts = cls()
        restarts.total = history.restarts
        restarts._times = [now - age for age in history.recent]
        restarts._culprits = list(history.culprits)

        for place in history.hang_places:
            restarts.hang_places[place.step, place.phase] = place.count

        return restarts

    def reason_to_end(self, failure: Failure, progress: bool, settings: Settings, now: float) -> str | None:
        """Return why the job is not restarted; None if it is. `progress`: the attempt saved a checkpoint."""
        # micro_batch=auto asked for this restart, and asks only a few times: each time the size is smaller.
        if failure.asks_for_smaller_micro_batch:
            return None

        if failure.is_one_of(LauncherFailure.HANG) and settings.hang.action == "stop":
            return "hang.action is stop"

        if failure.likely_to_repeat and not progress:
            return "no checkpoint has been saved since the last start, so the same error would most likely recur"

        if settings.restart.per_hour == 0:
            return "restart.per_hour is 0"

        count = len(within_last_hour(self._times, now))
        if count >= settings.restart.per_hour:
            return f"{count} restarts within the last hour, which is the limit"

        return None

    def count(self, failure: Failure, slot: Slot | None, saved: int | None, now: float) -> None:
        """Count the restart after a failure of this slot; `saved` is the newest checkpoint."""
        self.total += 1

        if not failure.asks_for_smaller_micro_batch:
            self._times.append(now)

            # A lost node, or a lost zygote, takes all its ranks with it: no slot is to blame.
            blameless = failure.is_one_of(LauncherFailure.NODE, LauncherFailure.ZYGOTE)
            self._culprits.append(Culprit(None if blameless else slot, saved))

    def count_hang(self, failure: Failure) -> None:
        """Count an attempt that was ended as a hang: the next one gets more time at this step and phase."""
        self.hang_places[failure.step, failure.phase] += 1

    def budget(self, failure: Failure, settings: Settings, now: float) -> str:
        """Return which restart of how many this is, in words."""
        if failure.asks_for_smaller_micro_batch:
            return "not counted as a restart"

        count = len(within_last_hour(self._times, now))
        return f"restart {count} of {settings.restart.per_hour} in an hour"

    def keeps_failing(self, failure: Failure) -> bool:
        """Return whether the last three restarts blame the same slot, with no new checkpoint between them."""
        # That the micro-batch is too large is not the slot's fault, and was not counted.
        if failure.asks_for_smaller_micro_batch or self._culprits[-1].slot is None:
            return False

        # A new checkpoint, or any other failure, starts a new streak.
        return self._culprits[-TIMES_IN_A_ROW:] == self._culprits[-1:] * TIMES_IN_A_ROW

    def end_streak(self) -> None:
        """Forget which slots failed, because the node of the last one now runs fewer ranks."""
        self._culprits.clear()
