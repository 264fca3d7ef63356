"""The attempts of a job: the ranks of the current attempt, and what is remembered from one attempt to the next.

`Restarts` is part of the `CoordinatorState` that all nodes receive: a node that takes over continues with it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep.config.schema import HangConfig, RestartConfig, Section
from lockstep.errors import plural
from lockstep.launch.failure import PREEMPTED, SMALLER, Failure, Kind, RankExit, left_early, pick_cause
from lockstep.launch.hangs.suspicion import RankView
from lockstep.launch.hangs.watchdog import Watchdog
from lockstep.launch.wire.messages import CoordinatorState

# After this many failures of one rank slot in a row, without a new checkpoint, its node runs one rank fewer, if
# `--nproc` allows it. Which device becomes free is not chosen: the remaining ranks have the lowest local numbers.
TIMES_IN_A_ROW = 3


# The machine's name, and the local rank there. They stay the same from attempt to attempt, while the numbers of nodes
# and ranks may change.
Slot = tuple[str, int]


# ---- whether to restart ----


class Settings(Section):
    """The settings of the task that the launcher needs. Until rank 0 has read them, the defaults apply."""

    hang: HangConfig = HangConfig()
    restart: RestartConfig = RestartConfig()


class Restarts:
    """Counts restarts and decides whether a failure is followed by another attempt."""

    def __init__(self) -> None:
        self.total = 0

        # The times of the restarts within the last hour.
        self.recent: list[float] = []

        # The rank slot that failed at each restart, and the newest checkpoint at that time.
        self._culprits: list[tuple[Slot | None, int | None]] = []

        # (step, phase) -> how many attempts ended there because no rank advanced.
        self.hang_places: Counter[tuple[int | None, str | None]] = Counter()

    def as_fields(self, now: float) -> dict[str, Any]:
        """Return the fields of a `CoordinatorState`. Times become ages, because the clocks of two machines differ."""
        return {
            "restarts": self.total,
            "recent": [now - moment for moment in self.recent],
            "culprits": [[list(slot) if slot else None, saved] for slot, saved in self._culprits[-TIMES_IN_A_ROW:]],
            "hang_places": [[step, phase, count] for (step, phase), count in self.hang_places.items()],
        }

    @classmethod
    def inherited(cls, state: CoordinatorState, now: float) -> Restarts:
        restarts = cls()
        restarts.total = state.restarts
        restarts.recent = [now - age for age in state.recent]
        restarts._culprits = [((slot[0], slot[1]) if slot else None, saved) for slot, saved in state.culprits]
        restarts.hang_places.update({(step, phase): count for step, phase, count in state.hang_places})
        return restarts

    def refusal(self, failure: Failure, progress: bool, settings: Settings, now: float) -> str | None:
        """Return why the job ends here, or None if it restarts. `progress`: the attempt saved a checkpoint."""
        self.recent = [moment for moment in self.recent if now - moment <= 3600.0]

        # micro_batch=auto asked for this restart, and asks only a few times: each time the size is smaller.
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
        """Count a restart. Returns whether the slot keeps failing without progress: its node should run fewer ranks."""
        self.total += 1
        if failure.kind == SMALLER:
            return False

        self.recent.append(now)
        self._culprits.append((slot, saved))

        # A new checkpoint, or a failure of another slot, starts a new streak. The slots of a lost node are gone anyway.
        in_a_row = self._culprits[-TIMES_IN_A_ROW:] == [(slot, saved)] * TIMES_IN_A_ROW
        keeps_failing = in_a_row and failure.kind != Kind.NODE
        if keeps_failing:
            self._culprits.clear()

        return keeps_failing


# ---- the ranks that run now ----


class Attempt:
    """The ranks of one attempt: where they run, and how they ended.

    `counts` is the number of ranks on each node, and `hosts` has the host of each node, even after the node has left.
    """

    def __init__(
        self,
        number: int,
        counts: Mapping[int, int],
        hosts: Mapping[int, str],
        started_from: int | None,
        watchdog: Watchdog,
    ):
        self.number = number
        self.hosts = hosts

        # Rank -> its node and its local rank there.
        ranks = [(node, local_rank) for node, count in counts.items() for local_rank in range(count)]
        self.ranks: dict[int, tuple[int, int]] = dict(enumerate(ranks))

        # The newest checkpoint's step when the attempt began.
        self.started_from = started_from

        # The ranks that have ended so far.
        self.exits: dict[int, RankExit] = {}
        self.watchdog = watchdog

    @property
    def running(self) -> set[int]:
        return self.ranks.keys() - self.exits.keys()

    def ranks_on(self, node: int) -> list[int]:
        return [rank for rank, (where, _) in self.ranks.items() if where == node]

    @property
    def all_clean(self) -> bool:
        return all(rank_exit.clean for rank_exit in self.exits.values())

    @property
    def any_preempted(self) -> bool:
        return any(rank_exit.code == PREEMPTED for rank_exit in self.exits.values())

    # ---- failures ----

    def root_cause(self) -> Failure:
        """Return the failure that explains how this attempt ended. At least one rank has failed."""
        failure = pick_cause(self.exits)
        assert failure is not None
        if not failure.host:
            failure = self._located(failure)

        finished = [rank for rank, rank_exit in self.exits.items() if rank_exit.code == 0 and rank_exit.clean]

        # Ranks complain about a lost peer, and no rank has failed by itself: the peer is a rank that ended too early.
        if failure.is_complaint and finished:
            rank = finished[0]
            return left_early(rank, self._host_of(rank), failure, self.exits[rank].exit_line)

        return failure

    def _located(self, failure: Failure) -> Failure:
        """Return a failure that another rank reported with host, step and phase of the rank at fault."""
        views = {view.rank: view for views in self.watchdog.views.values() for view in views}
        view = views.get(failure.rank)
        host = self._host_of(failure.rank) if failure.rank in self.ranks else ""
        return replace(failure, host=host, step=view.step if view else None, phase=view.phase if view else None)

    def overdue(self, still: Sequence[RankView] = ()) -> Failure:
        """Return the failure of ranks that were asked to save and did not exit; `still` are ranks that did not move."""
        if not still:
            late = self.running
            text = plural(
                len(late), "rank did not stop in time and was killed", "ranks did not stop in time and were killed"
            )
            return Failure(min(late), self._host_of(min(late)), time.time(), "SIGKILL", text)

        longest = max(still, key=lambda view: (not view.traits.waits, view.age))
        count = plural(len(still), "rank stood still and was killed", "ranks stood still and were killed")
        text = f"{count}, this one after {longest.age:.0f} s in its phase"
        return Failure(longest.rank, longest.host, time.time(), "SIGKILL", text, step=longest.step, phase=longest.phase)

    def others_than(self, failure: Failure) -> int:
        """Return how many ranks are stopped because of a failure of other ranks."""
        # A node, or the process that forked a node's ranks, takes all ranks of that node with it.
        failed = {failure.rank}
        if failure.kind in (Kind.NODE, Kind.ZYGOTE) and failure.rank in self.ranks:
            failed = set(self.ranks_on(self.ranks[failure.rank][0]))

        return len(self.ranks.keys() - failed)

    def _host_of(self, rank: int) -> str:
        node, _ = self.ranks[rank]
        return self.hosts[node]
