"""One attempt: a set of ranks that live and die together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from lockstep.launch.failure import Consequence, Failure, RankExit, Save, left_early, pick_root
from lockstep.launch.hangs.watchdog import Watchdog


class Attempt:
    """The ranks of one attempt: where they run, and how they ended.

    `counts` is the number of ranks on each node, and `hosts` has the host of each node, even after the node has left.
    """

    def __init__(
        self,
        number: int | None,
        counts: Mapping[int, int],
        hosts: Mapping[int, str],
        started_from: int | None,
        watchdog: Watchdog,
        started_here: bool = True,
    ):
        # Attempts of a job are numbered from 0 on; None if the job has had none.
        self.number = number

        # False until this coordinator starts an attempt: at the beginning of the job, and after a takeover. Such an
        # attempt has no ranks here, whatever became of the ranks of the previous coordinator.
        self.started_here = started_here
        self.counts = counts
        self.hosts = hosts

        # Rank -> its node, and the ranks of each node.
        self.ranks: dict[int, int] = dict(enumerate(node for node, count in counts.items() for _ in range(count)))

        self._ranks_on: dict[int, list[int]] = {}
        for rank, node in self.ranks.items():
            self._ranks_on.setdefault(node, []).append(rank)

        # The newest checkpoint's step when the attempt began.
        self.started_from = started_from

        # The nodes that have not confirmed yet that they start their ranks, and the deadline for that.
        self.unconfirmed: set[int] = set()
        self.confirm_by = math.inf

        # The ranks that have ended so far. After a failure, when the root failure is picked: until then the exit of a
        # rank that failed earlier may arrive.
        self.exits: dict[int, RankExit] = {}
        self.root_known_at = math.inf

        self.watchdog = watchdog

    @property
    def next_number(self) -> int:
        """The number of the attempt after this one."""
        return 0 if self.number is None else self.number + 1

    @property
    def running(self) -> set[int]:
        """The ranks that have not ended yet."""
        return self.ranks.keys() - self.exits.keys()

    @property
    def all_exited(self) -> bool:
        return len(self.exits) == len(self.ranks)

    def ranks_on(self, node: int) -> list[int]:
        """Return the ranks of a node, in order; [] for a node that has none."""
        return self._ranks_on.get(node, [])

    @property
    def nodes(self) -> set[int]:
        return set(self._ranks_on)

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed. The exit of a peer that failed first may still arrive."""
        return not all(rank_exit.clean for rank_exit in self.exits.values())

    @property
    def any_died_by_itself(self) -> bool:
        """Whether some rank has died without another's doing."""
        return any(rank_exit.consequence is Consequence.NEVER for rank_exit in self.exits.values())

    @property
    def finished(self) -> list[int]:
        """The ranks that have ended with code 0, the first one first."""
        return [rank for rank, rank_exit in self.exits.items() if rank_exit.code == 0 and rank_exit.clean]

    @property
    def save(self) -> Save | None:
        """What became of the save of ranks that were asked to save and exit; None if none of them has exited."""
        # What failed on one rank is no checkpoint.
        saves = {rank_exit.save for rank_exit in self.exits.values()}
        outcomes: tuple[Save, ...] = ("failed", "saved", "nothing")
        return next((save for save in outcomes if save in saves), None)

    def has_saved(self, newest: int | None) -> bool:
        """Return whether this attempt is known to have saved the newest checkpoint; `newest` is its step."""
        if newest is None or not self.started_here:
            return False

        # Ranks that were asked to exit have saved, perhaps at the very step that they started from.
        return newest != self.started_from or self.save == "saved"

    # ---- failures ----

    def root_failure(self) -> Failure:
        """Return the failure that explains how this attempt ended. At least one rank has failed."""
        root = pick_root(self.exits)
        assert root is not None
        failure = self.exits[root].failure
        assert failure is not None

        # A rank may have noticed that another one is out of step.
        if failure.rank != root:
            failure = self._located(failure)

        # Ranks only report a lost peer: that peer is a rank that ended too early.
        if self.exits[root].consequence >= Consequence.POSSIBLE and self.finished:
            rank = self.finished[0]
            return left_early(rank, self._host_of(rank), failure, self.exits[rank].exit_line)

        return failure

    def _located(self, failure: Failure) -> Failure:
        """Return a failure that another rank recorded, with host, step and phase of the rank that it names."""
        if failure.rank is None or failure.rank not in self.ranks:
            return replace(failure, host="", step=None, phase=None)

        # The last view of that rank says what it was doing.
        view = self.watchdog.last_view(failure.rank)
        step, phase = (view.step, view.phase) if view else (None, None)
        return replace(failure, host=self._host_of(failure.rank), step=step, phase=phase)

    def overdue_failure(self) -> Failure:
        """Return the failure of ranks that were asked to save and exit, and still run."""
        return self.watchdog.overdue({rank: self._host_of(rank) for rank in self.running})

    def count_ended_by(self, failure: Failure) -> int:
        """Return how many ranks end because of a failure of others: they are killed, or have failed as well."""
        # A node takes all its ranks with it.
        failed = {failure.rank} if failure.node is None else set(self.ranks_on(failure.node))
        finished = {rank for rank, rank_exit in self.exits.items() if rank_exit.clean}
        return len(self.ranks.keys() - failed - finished)

    def _host_of(self, rank: int) -> str:
        """Return the host of a rank, even if its node has left."""
        return self.hosts[self.ranks[rank]]
