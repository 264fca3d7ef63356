"""The attempts of a job: the ranks of the present one, and what is remembered from one to the next.

What is remembered outlives the node that coordinates: a node that takes over inherits it (`Handover`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from lockstep.config.schema import HangConfig, RestartConfig, Section
from lockstep.launch.failure import PREEMPTED, SMALLER, Failure, Kind, RankExit
from lockstep.launch.hangs.watchdog import Watchdog
from lockstep.launch.wire.protocol import Handover

# After this many failures of one rank slot in a row, without a new checkpoint, its node runs one rank fewer, if
# `--nproc` allows it. Which device becomes free is not chosen: the remaining ranks have the lowest local numbers.
TIMES_IN_A_ROW = 3


# A rank's place that stays the same from attempt to attempt, while its number may change: the machine's name, and its
# number among the ranks there.
Slot = tuple[str, int]


# ---- whether to restart ----


class Settings(Section):
    """The part of the task's configuration that concerns the launcher. The defaults hold until rank 0 has read it."""

    hang: HangConfig = HangConfig()
    restart: RestartConfig = RestartConfig()


class Restarts:
    """Counts restarts and decides whether a failure is followed by another one."""

    def __init__(self) -> None:
        self.total = 0

        # The times of the restarts within the last hour.
        self.recent: list[float] = []

        # The rank slot that failed at each restart, and the newest checkpoint at that time.
        self._culprits: list[tuple[Slot | None, int | None]] = []

        # (step, phase) -> how many attempts ended there because no rank advanced.
        self.hang_places: Counter[tuple[int | None, str | None]] = Counter()

    def for_handover(self, now: float) -> dict[str, Any]:
        """Return all of it as fields of a `Handover`. Clocks of two machines differ, so times are given as ages."""
        return {
            "restarts": self.total,
            "recent": [now - moment for moment in self.recent],
            "culprits": [[list(slot) if slot else None, saved] for slot, saved in self._culprits[-TIMES_IN_A_ROW:]],
            "hang_places": [[step, phase, count] for (step, phase), count in self.hang_places.items()],
        }

    @classmethod
    def inherited(cls, handover: Handover, now: float) -> Restarts:
        restarts = cls()
        restarts.total = handover.restarts
        restarts.recent = [now - age for age in handover.recent]
        restarts._culprits = [((slot[0], slot[1]) if slot else None, saved) for slot, saved in handover.culprits]
        restarts.hang_places.update({(step, phase): count for step, phase, count in handover.hang_places})
        return restarts

    def refusal(self, failure: Failure, progress: bool, settings: Settings, now: float) -> str | None:
        """Return why the job ends here, or None if it restarts. `progress`: the attempt saved a checkpoint."""
        self.recent = [moment for moment in self.recent if now - moment <= 3600.0]

        # micro_batch=auto asked for this restart. There are not many of them: the sizes only go down.
        if failure.kind == SMALLER:
            return None

        if failure.kind == Kind.HANG and settings.hang.action == "stop":
            return "hang.action is stop"
        if failure.likely_to_repeat and not progress:
            return "no checkpoint has been saved since the last start, so the same error would most likely recur"
        if settings.restart.per_hour == 0:
            return "restart.per_hour is 0"
        if len(self.recent) >= settings.restart.per_hour:
            return f"{len(self.recent)} restarts within the last hour, which is the limit"

        return None

    def note(self, failure: Failure, slot: Slot | None, saved: int | None, now: float) -> bool:
        """Count a restart. Returns whether its node should run fewer ranks: the slot keeps failing without progress."""
        self.total += 1
        if failure.kind == SMALLER:
            return False

        self.recent.append(now)
        self._culprits.append((slot, saved))

        # A new checkpoint, or another culprit, breaks the row. A lost node takes its slots with it.
        in_a_row = self._culprits[-TIMES_IN_A_ROW:] == [(slot, saved)] * TIMES_IN_A_ROW
        keeps_failing = in_a_row and failure.kind != Kind.NODE
        if keeps_failing:
            self._culprits.clear()

        return keeps_failing


# ---- the ranks that run now ----


class Attempt:
    """The ranks of one attempt: where they run, and how they ended.

    `ranks` says how many run on each node, and `hosts` what the nodes are called, also those that have left since.
    """

    def __init__(
        self,
        number: int,
        ranks: Mapping[int, int],
        hosts: Mapping[int, str],
        started_from: int | None,
        watchdog: Watchdog,
    ):
        self.number = number
        self.hosts = hosts

        # Rank -> its slot: the node, and its number among that node's ranks. A slot stays on the same machine in the
        # next attempt, while a rank may move.
        slots = [(node, local) for node, count in ranks.items() for local in range(count)]
        self.slots: dict[int, tuple[int, int]] = dict(enumerate(slots))

        # The newest checkpoint's step when the attempt began.
        self.started_from = started_from

        # The ranks that have ended so far.
        self.exits: dict[int, RankExit] = {}
        self.watchdog = watchdog

    @property
    def running(self) -> set[int]:
        return self.slots.keys() - self.exits.keys()

    def ranks_on(self, node: int) -> list[int]:
        return [rank for rank, (where, _) in self.slots.items() if where == node]

    @property
    def all_clean(self) -> bool:
        return all(rank_exit.clean for rank_exit in self.exits.values())

    @property
    def any_preempted(self) -> bool:
        return any(rank_exit.code == PREEMPTED for rank_exit in self.exits.values())
