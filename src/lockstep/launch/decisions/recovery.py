"""What follows a failure: another attempt, with the same ranks or fewer, or the end of the job."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lockstep.errors import ExitCode, plural
from lockstep.launch.decisions.attempt import Attempt
from lockstep.launch.decisions.cluster import Cluster
from lockstep.launch.decisions.restarts import Restarts
from lockstep.launch.decisions.settings import Settings
from lockstep.launch.failure import Failure, LauncherFailure
from lockstep.launch.hangs.suspicion import Places
from lockstep.launch.wire.messages import CoordinatorState, Slot


@dataclass(frozen=True)
class Situation:
    """The state of the job when an attempt has failed."""

    attempt: Attempt
    saved: int | None  # the step of the newest checkpoint
    settings: Settings
    preempt_signal: str | None  # the signal that asked the job to save and exit, if one did
    nothing_to_save: bool  # no training would be lost if the job ended now without a checkpoint
    now: float

    @property
    def progress(self) -> bool:
        """Whether the attempt has saved a checkpoint."""
        return self.saved != self.attempt.started_from

    @property
    def can_be_resumed(self) -> bool:
        """Whether the job can be resumed later without losing training: something was saved, or nothing has to be."""
        return self.nothing_to_save or self.saved is not None or self.attempt.any_preempted


# ---- what follows a failure, once the ranks of the attempt are gone ----


@dataclass(frozen=True)
class Restart:
    """Another attempt, from the newest checkpoint.

    `raise_limit`: it gets more time where this one seemed to hang. Otherwise slow work that is taken for a hang would
    end every attempt at the same step.
    """

    raise_limit: bool


@dataclass(frozen=True)
class UndoResize:
    """Another attempt, with as many ranks as before the resize."""


@dataclass(frozen=True)
class EndPreempted:
    """The job ends as preempted: it was asked to save and exit, and it can be resumed."""


@dataclass(frozen=True)
class End:
    """The job ends as failed, with this exit code. `reason`: why it is not restarted."""

    code: ExitCode
    reason: str


Decision = Restart | UndoResize | EndPreempted | End


class Recovery:
    """Decides what follows a failure, and remembers what that depends on: the restarts so far, and the last resize.

    `inherited` is the last state of a lost coordinator, or an empty one.
    """

    def __init__(self, cluster: Cluster, inherited: CoordinatorState, now: float):
        self._cluster = cluster
        self.restarts = Restarts.inherited(inherited.history, now)

        # The last attempt before a resize, and its ranks on each node, which are restored if the new size fails.
        self._before_resize: tuple[Attempt, Counter[int]] | None = None

    @property
    def hang_places(self) -> Places:
        """Where earlier attempts were ended as hanging."""
        return self.restarts.hang_places

    def decide(self, failure: Failure, situation: Situation) -> Decision:
        """Return what follows a failure. Nothing changes here: `FailureHandler.settle` acts on the answer."""
        if self._resize_may_be_at_fault(failure, situation):
            return UndoResize()

        if failure.for_user:
            return End(ExitCode.REFUSED, "the same program would run into the same error")

        # The job was ending anyway. If it cannot be resumed, it has failed.
        if situation.preempt_signal:
            asked = f"the job was asked to save and exit ({situation.preempt_signal})"
            return EndPreempted() if situation.can_be_resumed else End(ExitCode.FAILED, asked)

        # After a takeover the other nodes have yet to join, so a shortage means nothing yet.
        shortage = self._cluster.shortage if situation.attempt.started_here else None
        if shortage:
            return End(situation.settings.code_if_nodes_are_missing, shortage)

        reason = self.restarts.reason_to_end(failure, situation.progress, situation.settings, situation.now)
        if reason:
            return End(ExitCode.FAILED, reason)

        reached_limit = failure.is_one_of(LauncherFailure.HANG) and situation.attempt.watchdog.reached_a_limit
        return Restart(raise_limit=reached_limit)

    # ---- a restart ----

    def restart(self, restart: Restart, failure: Failure, situation: Situation) -> str:
        """Count a restart, and return it in words."""
        self._count(restart, failure, situation)
        return self._describe(restart, failure, situation)

    def _count(self, restart: Restart, failure: Failure, situation: Situation) -> None:
        """Count a restart. A node with a slot that keeps failing runs one rank fewer from now on."""
        if restart.raise_limit:
            self.restarts.count_hang(failure)

        # Not every failure is that of a rank: a lost node may have had none.
        ranks = situation.attempt.ranks
        if failure.rank is None or failure.rank not in ranks:
            self.restarts.count(failure, None, situation.saved, situation.now)
            return

        node, local_rank = ranks[failure.rank]
        self.restarts.count(failure, Slot(failure.host, local_rank), situation.saved, situation.now)

        # A device may be broken: the job goes on without it, and the slots start a new count.
        if self.restarts.keeps_failing(failure):
            self._cluster.shrink(node)
            self.restarts.end_streak()

    def _describe(self, restart: Restart, failure: Failure, situation: Situation) -> str:
        """Return a counted restart in words."""
        # After a takeover the other nodes have yet to join, so the number of ranks is not known.
        started_here = situation.attempt.started_here
        what = plural(self._cluster.world_size, "rank") if started_here else "the nodes that are left"

        source = "the beginning" if situation.saved is None else f"the checkpoint of step {situation.saved}"
        budget = self.restarts.budget(failure, situation.settings, situation.now)

        limit = f"; with a higher limit for step {failure.step}, phase {failure.phase}" if restart.raise_limit else ""

        return f"restarting {what} from {source} ({budget}){limit}"

    # ---- a resize that fails ----

    def resize(self, ranks: int, attempt: Attempt) -> None:
        """Have the next attempt run this many ranks; if that attempt fails, return to the size of `attempt`."""
        self._cluster.resize(ranks)

        # If no attempt has started here, no size is known to work.
        if attempt.started_here:
            self._before_resize = (attempt, Counter(node for node, _ in attempt.ranks.values()))

    def _resize_may_be_at_fault(self, failure: Failure, situation: Situation) -> bool:
        """Return whether this is the first attempt after a resize, ended by its own error before it saved anything."""
        # A signal, or a lost machine, may end any attempt. Only an error that repeats can come from the new size.
        repeats = failure.for_user or failure.likely_to_repeat
        if self._before_resize is None or situation.preempt_signal or not repeats:
            return False

        last, counts = self._before_resize

        same_nodes = counts.keys() == self._cluster.wanted.keys()
        return situation.attempt.number == last.next_number and same_nodes and not situation.progress

    def undo_resize(self) -> None:
        """Have the next attempt run as many ranks as before the last resize."""
        assert self._before_resize is not None
        _, counts = self._before_resize
        self._cluster.wanted = dict(counts)
        self._before_resize = None
