"""What follows a failure: another attempt, with the same ranks or fewer, or the end of the job."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lockstep.errors import ExitCode, plural
from lockstep.launch.decisions.attempt import Attempt
from lockstep.launch.decisions.cluster import Cluster
from lockstep.launch.decisions.outbox import Outbox
from lockstep.launch.decisions.restarts import Restarts
from lockstep.launch.decisions.settings import Settings
from lockstep.launch.failure import Failure, Kind
from lockstep.launch.wire.messages import CoordinatorState, JobEnd


@dataclass(frozen=True)
class Situation:
    """The state of the job when an attempt has failed."""

    attempt: Attempt
    saved: int | None  # the step of the newest checkpoint
    settings: Settings
    preempt_signal: str | None  # the signal that asked the job to save and exit, if one did
    how_to_continue: str  # what to type after the end of the job, in words
    now: float

    @property
    def progress(self) -> bool:
        """Whether the attempt has saved a checkpoint."""
        return self.saved != self.attempt.started_from


@dataclass(frozen=True)
class Decision:
    """What follows once all ranks are gone: the end of the job, or another attempt.

    If the job was asked to stop, neither follows: it ends as preempted.
    """

    end: JobEnd | None = None

    # Log a `restart` event when the next attempt starts, because its size is not known before.
    log_restart: bool = False


class Recovery:
    """Decides what happens once the ranks of a failed attempt are gone, and announces it.

    It remembers the restarts so far, and the last resize. `inherited` is the last state of a lost coordinator, or an
    empty one.
    """

    def __init__(self, cluster: Cluster, outbox: Outbox, inherited: CoordinatorState, now: float):
        self._cluster = cluster
        self._outbox = outbox
        self.restarts = Restarts.inherited(inherited, now)

        # The last attempt before a resize, and its ranks on each node, which are restored if the new size fails.
        self._before_resize: tuple[Attempt, Counter[int]] | None = None

    def decide(self, failure: Failure, situation: Situation, end_as_preempted: bool = False) -> Decision:
        """Announce the failure of an attempt, and decide whether another one follows.

        `end_as_preempted`: if the job was asked to stop, it ends as preempted even if nothing was saved.
        """
        attempt = situation.attempt
        nothing_is_lost = end_as_preempted or situation.saved is not None or attempt.any_preempted
        if self._resize_may_be_at_fault(failure, situation):
            return self._return_to_size(failure, attempt)

        if failure.for_user:
            # The same program would run into the same error, and the message already says what to do.
            self._announce(failure, attempt)
            return Decision(JobEnd(ExitCode.REFUSED, failure))

        if situation.preempt_signal and nothing_is_lost:
            # The job was stopping anyway: it ends as preempted, and not as failed.
            self._announce(failure, attempt, "the job was asked to stop: not restarted")
            return Decision()

        if reason := self._refusal(failure, situation):
            return self._end(failure, situation, reason)

        return self._restart(failure, situation)

    def _announce(self, failure: Failure, attempt: Attempt, verdict: str = "") -> None:
        self._outbox.announce_failure(failure, attempt.number, attempt.count_stopped_by(failure), verdict)

    # ---- the end, or a restart ----

    def _refusal(self, failure: Failure, situation: Situation) -> str | None:
        """Return why the job is not restarted, or None if it is."""
        if situation.preempt_signal:
            return f"the job was asked to stop ({situation.preempt_signal})"

        # After a takeover the other nodes have yet to join.
        too_few = self._cluster.too_few if situation.attempt.started_here else None
        return too_few or self.restarts.refusal(failure, situation.progress, situation.settings, situation.now)

    def _end(self, failure: Failure, situation: Situation, reason: str) -> Decision:
        """Announce that the job is not restarted. It ends when all ranks of this attempt are gone."""
        # With nothing saved, the same error would most likely recur, so no command is suggested.
        hopeless = situation.saved is None and failure.likely_to_repeat
        hint = "" if hopeless else f". {situation.how_to_continue}"
        self._announce(failure, situation.attempt, f"not restarted: {reason}{hint}")

        missing = reason == self._cluster.too_few
        return Decision(JobEnd(situation.settings.code_if_nodes_are_missing if missing else ExitCode.FAILED, failure))

    def _restart(self, failure: Failure, situation: Situation) -> Decision:
        """Count the restart and announce it. The next attempt starts when all ranks of this one are gone."""
        attempt, saved, now = situation.attempt, situation.saved, situation.now
        node, local_rank = (None, None) if failure.rank is None else attempt.ranks.get(failure.rank, (None, None))
        slot = None if local_rank is None else (failure.host, local_rank)
        self.restarts.count(failure, slot, saved, now)
        if node is not None and self.restarts.keeps_failing(failure):
            self._cluster.shrink(node)
            self.restarts.end_streak()

        # After a takeover the other nodes have yet to join, so the number of ranks is not known.
        what = plural(self._cluster.world_size, "rank") if attempt.started_here else "the nodes that are left"
        source = "the beginning" if saved is None else f"the checkpoint of step {saved}"
        verdict = f"restarting {what} from {source} ({self.restarts.budget(failure, situation.settings, now)})"

        # Slow work that is taken for a hang would end every attempt at the same step.
        if failure.noticed_as(Kind.HANG) and attempt.watchdog.reached_a_limit:
            self.restarts.hang_places[failure.step, failure.phase] += 1
            verdict += f"; with a higher limit for step {failure.step}, phase {failure.phase}"

        self._announce(failure, attempt, verdict)
        return Decision(log_restart=True)

    # ---- a resize that fails ----

    def resize(self, ranks: int, attempt: Attempt) -> None:
        """Have the next attempt run this many ranks; if that attempt fails, return to the size of `attempt`."""
        before = self._cluster.world_size
        self._cluster.resize(ranks)
        self._log_resize(before)

        # If no attempt has started here, no size is known to work.
        if attempt.started_here:
            self._before_resize = (attempt, Counter(node for node, _ in attempt.ranks.values()))

    def _log_resize(self, before: int) -> None:
        self._outbox.log("resize", **{"from": before, "to": self._cluster.world_size})

    def _resize_may_be_at_fault(self, failure: Failure, situation: Situation) -> bool:
        """Return whether this is the first attempt after a resize, ended by its own error before it saved anything."""
        repeats = failure.for_user or failure.likely_to_repeat
        if self._before_resize is None or situation.preempt_signal or not repeats:
            return False

        last, counts = self._before_resize
        same_nodes = counts.keys() == self._cluster.wanted.keys()
        return situation.attempt.number == last.next_number and same_nodes and not situation.progress

    def _return_to_size(self, failure: Failure, attempt: Attempt) -> Decision:
        """Announce the failure, and have the next attempt run as many ranks as before the resize."""
        assert self._before_resize is not None
        refused = self._cluster.world_size
        self._cluster.wanted = dict(self._before_resize[1])
        self._before_resize = None
        world_size = self._cluster.world_size
        self._announce(failure, attempt)
        self._outbox.say(f"not resized to {plural(refused, 'rank')}: continuing with {plural(world_size, 'rank')}")
        self._log_resize(refused)
        return Decision()
