"""An attempt is a set of ranks that live and die together. A job makes one attempt after another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from lockstep.launch.decisions.job_nodes import JobNodes
from lockstep.launch.decisions.recovery import AttemptFacts
from lockstep.launch.decisions.status import ACTIVE, CurrentStatus, JobStatus
from lockstep.launch.failure import Failure, RankExit, SaveOutcome, left_early, pick_root
from lockstep.launch.hangs.watchdog import Watchdog


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
        # Attempts of a job are numbered from 0 on.
        self.number = number
        self.counts = counts
        self._hosts = hosts

        # All ranks, and those of each node: they are numbered here, node by node.
        self._ranks_on: dict[int, range] = {}
        world_size = 0
        for node, count in counts.items():
            self._ranks_on[node] = range(world_size, world_size + count)
            world_size += count

        self.ranks = range(world_size)

        # The newest checkpoint's step when the attempt began.
        self.started_from = started_from

        # The lowest step from which the ranks may have started, None for the beginning: if the newest checkpoint is
        # damaged, it is set aside, and they start from the one before it.
        self._lowest_start = started_from

        # The nodes that have not confirmed yet that they start their ranks, and the deadline for that.
        self.awaiting_start: set[int] = set()
        self.confirm_by = math.inf

        # How ranks have exited so far.
        self.exits: dict[int, RankExit] = {}

        # Set when the first rank fails: the time at which we pick the root failure. Earlier failures may arrive until
        # then.
        self.choose_root_at = math.inf

        # Set when the ranks were asked to save before any of them had ended a step, and are killed for that.
        self.had_nothing_to_save = False

        self.watchdog = watchdog

    @property
    def running_ranks(self) -> set[int]:
        """The ranks that have not exited yet."""
        return set(self.ranks) - self.exits.keys()

    @property
    def all_exited(self) -> bool:
        return len(self.exits) == len(self.ranks)

    def ranks_on(self, node: int) -> range:
        """Return the ranks of a node; none for a node that is not part of this attempt."""
        return self._ranks_on.get(node, range(0))

    @property
    def nodes(self) -> set[int]:
        return set(self._ranks_on)

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed. The exit of a peer that failed first may still arrive."""
        return not all(rank_exit.clean for rank_exit in self.exits.values())

    @property
    def any_ended_from_outside(self) -> bool:
        """Whether some rank was ended from outside, which no other rank can have caused."""
        return any(
            rank_exit.failure is not None and rank_exit.failure.from_outside for rank_exit in self.exits.values()
        )

    @property
    def finished(self) -> list[int]:
        """The ranks that have exited with code 0, the first one first."""
        return [rank for rank, rank_exit in self.exits.items() if rank_exit.code == 0 and rank_exit.clean]

    @property
    def save_outcome(self) -> SaveOutcome | None:
        """The outcome of the save of ranks that were asked to save and exit; None if none of them has exited."""
        # If the save failed on one rank, there is no checkpoint.
        saves = {rank_exit.save_outcome for rank_exit in self.exits.values()}
        outcomes: tuple[SaveOutcome, ...] = ("failed", "saved", "nothing")
        return next((save for save in outcomes if save in saves), None)

    def note_newest_step(self, newest_step: int | None) -> None:
        """Note the step of the newest checkpoint now; None if there is none."""
        if self._lowest_start is not None and (newest_step is None or newest_step < self._lowest_start):
            self._lowest_start = newest_step

    def has_saved(self, newest_step: int | None) -> bool:
        """Return whether this attempt is known to have saved the newest checkpoint, which has this step."""
        if newest_step is None:
            return False

        # Ranks that were asked to exit have saved, perhaps at the very step that they started from.
        is_later = self._lowest_start is None or newest_step > self._lowest_start
        return is_later or self.save_outcome == "saved"

    def facts(self, newest_step: int | None) -> AttemptFacts:
        """Return the facts on which a decision depends. `newest_step` is that of the newest checkpoint."""
        save_outcome = self.save_outcome or ("nothing" if self.had_nothing_to_save else None)
        return AttemptFacts(
            was_started=True,
            has_saved=self.has_saved(newest_step),
            save_outcome=save_outcome,
            any_finished=bool(self.finished),
        )

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
        if failure.lost_peer != "no" and self.finished:
            rank = self.finished[0]
            return left_early(rank, self.host_of(rank), failure, self.exits[rank].exit_line)

        return failure

    def _located(self, failure: Failure) -> Failure:
        """Return a failure that another rank recorded, with host, step and phase of the rank that it names."""
        if failure.rank is None or failure.rank not in self.ranks:
            return replace(failure, host="", step=None, phase=None)

        # The last view of that rank says what it was doing.
        view = self.watchdog.last_view(failure.rank)
        step, phase = (view.step, view.phase) if view else (None, None)
        return replace(failure, host=self.host_of(failure.rank), step=step, phase=phase)

    def count_ended_by(self, failure: Failure) -> int:
        """Return how many ranks end because of a failure of others: they are killed, or have failed as well."""
        # A node takes all its ranks with it.
        failed = {failure.rank} if failure.node is None else set(self.ranks_on(failure.node))
        finished = {rank for rank, rank_exit in self.exits.items() if rank_exit.clean}
        return len(set(self.ranks) - failed - finished)

    def host_of(self, rank: int) -> str:
        """Return the host of a rank, even if its node has left."""
        return next(self._hosts[node] for node, ranks in self._ranks_on.items() if rank in ranks)


class Attempts:
    """The attempts of a job. `NextAttempt` begins one after another."""

    def __init__(self, status: CurrentStatus, nodes: JobNodes, last_number: int | None):
        self._status = status
        self._nodes = nodes

        # The newest attempt that this coordinator has started, None if it has started none; and the number of the job's
        # newest attempt, which a lost coordinator may have started.
        self.newest: Attempt | None = None
        self.last_number = last_number

    def begin(self, attempt: Attempt) -> None:
        """Note a new attempt, whose ranks start now."""
        self.newest = attempt
        self.last_number = attempt.number

    @property
    def active(self) -> Attempt | None:
        """The attempt whose ranks run now, None if none do."""
        return self.newest if self._status.current in ACTIVE else None

    @property
    def healthy(self) -> Attempt | None:
        """The attempt whose ranks run now, None if none do, or if one of them has failed already."""
        return self.active if self.active is not None and not self.active.has_failed else None

    @property
    def asked_to_save(self) -> bool:
        """Whether the ranks that run were asked to save and exit."""
        return self._status.current is JobStatus.SAVE_AND_EXIT

    @property
    def starts_due(self) -> float:
        """When all nodes must have confirmed that they start their ranks; infinite if they have."""
        attempt = self.active
        return attempt.confirm_by if attempt is not None and self.unconfirmed_nodes else math.inf

    @property
    def unconfirmed_nodes(self) -> list[int]:
        """The nodes that have not confirmed yet that they start their ranks, and still belong to the job."""
        return sorted(self.newest.awaiting_start & self._nodes.joined.keys()) if self.newest is not None else []

    @property
    def nodes(self) -> set[int]:
        """The nodes that have ranks of the newest attempt, and still belong to the job."""
        return self.newest.nodes & self._nodes.joined.keys() if self.newest is not None else set()
