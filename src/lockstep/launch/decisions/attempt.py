"""One attempt: a set of ranks that live and die together."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from lockstep.errors import plural
from lockstep.launch.decisions.restarts import Settings
from lockstep.launch.failure import PREEMPTED, Failure, Kind, RankExit, left_early, pick_root
from lockstep.launch.hangs.suspicion import RankView
from lockstep.launch.hangs.watchdog import Watchdog
from lockstep.launch.wire.messages import Message, NodeBeat, RankExited, RanksGone, SignalReceived, Stacks, ZygoteLost
from lockstep.runtime.preemption import PREEMPT_SIGNALS


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

        # Rank -> its node and its local rank there, and the ranks of each node.
        ranks = [(node, local_rank) for node, count in counts.items() for local_rank in range(count)]
        self.ranks: dict[int, tuple[int, int]] = dict(enumerate(ranks))
        self._ranks_on: dict[int, list[int]] = {}
        for rank, (node, _) in self.ranks.items():
            self._ranks_on.setdefault(node, []).append(rank)

        # The newest checkpoint's step when the attempt began.
        self.started_from = started_from

        # The ranks that have ended so far.
        self.exits: dict[int, RankExit] = {}
        self.watchdog = watchdog

    @property
    def running(self) -> set[int]:
        return self.ranks.keys() - self.exits.keys()

    @property
    def all_exited(self) -> bool:
        return len(self.exits) == len(self.ranks)

    def ranks_on(self, node: int) -> list[int]:
        return self._ranks_on.get(node, [])

    @property
    def nodes(self) -> set[int]:
        return set(self._ranks_on)

    def problem_with(self, message: Message, node: int) -> str | None:
        """Return why this message of a node cannot be right, or None. No later code checks it again."""
        ranks: Collection[int] = ()
        match message:
            case RanksGone() | ZygoteLost():
                pass
            case SignalReceived():
                if message.signal not in [number.name for number in PREEMPT_SIGNALS]:
                    return f"{message.signal} is no signal that preempts a job"
            case RankExited():
                ranks = [message.rank]
                if message.exit.failure is None and not message.exit.clean:
                    return f"rank {message.rank} failed without a failure"
            case Stacks():
                ranks = message.stacks.keys() | message.collectives.keys()
            case NodeBeat():
                ranks = [view.rank for view in message.views]
                try:
                    Settings(**message.settings)
                except (TypeError, ValueError) as error:
                    return f"its settings are not valid: {error}"
            case _:
                return f"{type(message).__name__} is not for the coordinator"

        # A message about an earlier attempt is ignored anyway.
        strange = set(ranks) - set(self.ranks_on(node))
        of_this_attempt = getattr(message, "attempt", None) == self.number
        return f"ranks {sorted(strange)} are not its ranks" if strange and of_this_attempt else None

    @property
    def all_clean(self) -> bool:
        return all(rank_exit.clean for rank_exit in self.exits.values())

    @property
    def any_preempted(self) -> bool:
        return any(rank_exit.code == PREEMPTED for rank_exit in self.exits.values())

    # ---- failures ----

    def root_failure(self) -> Failure:
        """Return the failure that explains how this attempt ended. At least one rank has failed."""
        failure = pick_root(self.exits)
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
