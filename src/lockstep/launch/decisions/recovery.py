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
class Refusal:
    """Why the job is not restarted, and the exit code that it ends with."""

    reason: str
    code: ExitCode = ExitCode.FAILED


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

        # Whether the next attempt is logged as a restart when it starts; its size is not known before.
        self.log_restart = False

    def decide(self, failure: Failure, situation: Situation, nothing_to_save: bool = False) -> JobEnd | None:
        """Announce the failure of an attempt, and return how the job ends once all ranks are gone.

        Returns None if another attempt follows, and if the job ends as preempted because it was asked to.
        `nothing_to_save`: no training would be lost if the job ended now without a checkpoint.
        """
        attempt = situation.attempt
        can_be_resumed = nothing_to_save or situation.saved is not None or attempt.any_preempted
        if self._resize_may_be_at_fault(failure, situation):
            self._return_to_size(failure, attempt)
            return None

        if failure.for_user:
            # The same program would run into the same error, and the message already says what to do.
            self._announce(failure, attempt)
            return JobEnd(ExitCode.REFUSED, failure)

        if situation.preempt_signal and can_be_resumed:
            # The job was ending anyway: it ends as preempted, and not as failed.
            self._announce(failure, attempt, "not restarted: the job was asked to save and exit")
            return None

        if refusal := self._refusal(failure, situation):
            self._announce_end(failure, situation, refusal)
            return JobEnd(refusal.code, failure)

        self._restart(failure, situation)
        self.log_restart = True
        return None

    def _announce(self, failure: Failure, attempt: Attempt, verdict: str = "") -> None:
        self._outbox.announce_failure(failure, attempt.number, attempt.count_killed_by(failure), verdict)

    # ---- the end, or a restart ----

    def _refusal(self, failure: Failure, situation: Situation) -> Refusal | None:
        """Return why the job is not restarted, or None if it is."""
        if situation.preempt_signal:
            return Refusal(f"the job was asked to save and exit ({situation.preempt_signal})")

        # After a takeover the other nodes have yet to join.
        if situation.attempt.started_here and (too_few := self._cluster.too_few):
            return Refusal(too_few, situation.settings.code_if_nodes_are_missing)

        reason = self.restarts.refusal(failure, situation.progress, situation.settings, situation.now)
        return Refusal(reason) if reason else None

    def _announce_end(self, failure: Failure, situation: Situation, refusal: Refusal) -> None:
        """Announce that the job is not restarted. It ends when all ranks of this attempt are gone."""
        # With nothing saved, the same error would most likely recur, so no command is suggested.
        hopeless = situation.saved is None and failure.likely_to_repeat
        hint = "" if hopeless else f". {situation.how_to_continue}"
        self._announce(failure, situation.attempt, f"not restarted: {refusal.reason}{hint}")

    def _restart(self, failure: Failure, situation: Situation) -> None:
        """Count the restart and announce it. The next attempt starts when all ranks of this one are gone."""
        attempt = situation.attempt
        saved = situation.saved
        now = situation.now

        # Count it. A node with a slot that keeps failing runs one rank fewer.
        if failure.rank is None or failure.rank not in attempt.ranks:
            self.restarts.count(failure, None, saved, now)
        else:
            node, local_rank = attempt.ranks[failure.rank]
            self.restarts.count(failure, (failure.host, local_rank), saved, now)
            if self.restarts.keeps_failing(failure):
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

    def _return_to_size(self, failure: Failure, attempt: Attempt) -> None:
        """Announce the failure, and have the next attempt run as many ranks as before the resize."""
        assert self._before_resize is not None
        failed_size = self._cluster.world_size
        _, counts = self._before_resize
        self._cluster.wanted = dict(counts)
        self._before_resize = None

        self._announce(failure, attempt)
        sizes = f"not resized to {plural(failed_size, 'rank')}: continuing with "
        self._outbox.say(sizes + plural(self._cluster.world_size, "rank"))
        self._log_resize(failed_size)
