"""What follows a failure: another attempt, with the same ranks or fewer, or the end of the job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from lockstep.errors import ExitCode, plural
from lockstep.launch.decisions.attempt import Attempt
from lockstep.launch.decisions.cluster import Cluster
from lockstep.launch.decisions.outbox import Outbox
from lockstep.launch.decisions.restarts import Restarts, Settings
from lockstep.launch.failure import Failure, Kind
from lockstep.launch.job import Job
from lockstep.launch.wire.messages import CoordinatorState, JobEnd


class Recovery:
    """Decides what happens once the ranks of a failed attempt are gone, and announces it.

    `committed` returns the newest checkpoint's step. `inherited` is the last state of a lost coordinator, or an empty
    one.
    """

    def __init__(
        self,
        job: Job,
        committed: Callable[[], int | None],
        cluster: Cluster,
        outbox: Outbox,
        inherited: CoordinatorState,
        now: float,
    ):
        self._job = job
        self._committed = committed
        self._cluster = cluster
        self._outbox = outbox
        self.settings = Settings(**inherited.settings)
        self.restarts = Restarts.inherited(inherited, now)

        # The first signal that asked the job to save and exit. From then on no attempt is started.
        self.preempt_signal = inherited.preempt_signal

        # How the job ends once all ranks are gone; None if another attempt follows, or if the job ends as preempted.
        self.planned_end: JobEnd | None = None

        # Whether to log a `restart` event when the next attempt starts; only then is its number of ranks known.
        self.restart_to_log = False

        # The last attempt before a resize, and its ranks on each node, which are restored if the new size fails.
        self._before_resize: tuple[int, Counter[int]] | None = None

    def as_fields(self, now: float) -> dict[str, Any]:
        """Return the fields of a `CoordinatorState`."""
        settings = self.settings.model_dump()
        return {"settings": settings, "preempt_signal": self.preempt_signal, **self.restarts.as_fields(now)}

    @property
    def how_to_continue(self) -> str:
        how = "start over" if self._committed() is None else "resume"
        return f"To {how}: {self._job.resume_command}"

    @property
    def code_if_nodes_are_missing(self) -> ExitCode:
        """The platform may have other machines, unless the user wants no restart at all."""
        return ExitCode.RESTART if self.settings.restart.per_hour else ExitCode.FAILED

    def decide(self, failure: Failure, attempt: Attempt, now: float, nothing_to_save: bool = False) -> None:
        """Report the failure of an attempt, and decide whether another one follows.

        After a takeover the attempt has no ranks here. `nothing_to_save`: the ranks were asked to stop, and were killed
        before their first step.
        """
        saved = self._committed()
        nothing_is_lost = nothing_to_save or saved is not None or attempt.any_preempted
        if self._resize_may_be_at_fault(failure, attempt, saved):
            self._return_to_size(failure, attempt)
        elif failure.for_user:
            # The same program would run into the same error, and the message already says what to do.
            self.planned_end = JobEnd(ExitCode.REFUSED, failure)
            self._report(failure, attempt)
        elif self.preempt_signal and nothing_is_lost:
            # The job was stopping anyway: it ends as preempted, and not as failed.
            self._report(failure, attempt, "the job was asked to stop: not restarted")
        elif reason := self._refusal(failure, attempt, saved, now):
            self._plan_end(failure, attempt, reason, saved)
        else:
            self._plan_restart(failure, attempt, saved, now)

    def _report(self, failure: Failure, attempt: Attempt, verdict: str = "") -> None:
        self._outbox.report(failure, attempt.number, attempt.others_than(failure), verdict)

    # ---- the end, or a restart ----

    def _refusal(self, failure: Failure, attempt: Attempt, saved: int | None, now: float) -> str | None:
        """Return why the job is not restarted, or None if it is."""
        if self.preempt_signal:
            return f"the job was asked to stop ({self.preempt_signal})"

        # After a takeover the other nodes have yet to join.
        too_few = self._cluster.too_few if attempt.ranks else None
        progress = saved != attempt.started_from
        return too_few or self.restarts.refusal(failure, progress, self.settings, now)

    def _plan_end(self, failure: Failure, attempt: Attempt, reason: str, saved: int | None) -> None:
        """Announce that the job is not restarted. It ends when all ranks of this attempt are gone."""
        # With nothing saved, the same error would most likely recur, so no command is suggested.
        hint = "" if saved is None and failure.likely_to_repeat else f". {self.how_to_continue}"
        code = self.code_if_nodes_are_missing if reason == self._cluster.too_few else ExitCode.FAILED
        self.planned_end = JobEnd(code, failure)
        self._report(failure, attempt, f"not restarted: {reason}{hint}")

    def _plan_restart(self, failure: Failure, attempt: Attempt, saved: int | None, now: float) -> None:
        """Count the restart and announce it. The next attempt starts when all ranks of this one are gone."""
        node, local_rank = attempt.ranks.get(failure.rank, (None, None))
        slot = None if local_rank is None else (failure.host, local_rank)
        self.restart_to_log = True
        self.restarts.count(failure, slot, saved, now)
        if node is not None and self.restarts.keeps_failing(failure):
            self._cluster.shrink(node)
            self.restarts.end_streak()

        # After a takeover the other nodes have yet to join, so the number of ranks is not known.
        what = plural(self._cluster.world_size, "rank") if attempt.ranks else "the nodes that are left"
        source = "the beginning" if saved is None else f"the checkpoint of step {saved}"
        verdict = f"restarting {what} from {source} ({self.restarts.budget(failure, self.settings, now)})"

        # Slow work that is taken for a hang would end every attempt at the same step.
        if failure.kind == Kind.HANG and attempt.watchdog.reached_a_limit:
            self.restarts.hang_places[failure.step, failure.phase] += 1
            verdict += f"; with a higher limit for step {failure.step}, phase {failure.phase}"

        self._report(failure, attempt, verdict)

    # ---- a resize that fails ----

    def resize(self, ranks: int, attempt: Attempt) -> None:
        """Have the next attempt run this many ranks; if it fails, the one after it runs as many as `attempt`."""
        before = self._cluster.world_size
        self._cluster.resize(ranks)
        self._log_resize(before)

        # Before the first attempt there is no size that is known to work.
        if attempt.ranks:
            self._before_resize = (attempt.number, Counter(node for node, _ in attempt.ranks.values()))

    def _log_resize(self, before: int) -> None:
        self._outbox.log("resize", **{"from": before, "to": self._cluster.world_size})

    def _resize_may_be_at_fault(self, failure: Failure, attempt: Attempt, saved: int | None) -> bool:
        """Return whether this is the first attempt after a resize, and failed by itself before it saved anything."""
        if self._before_resize is None or self.preempt_signal or not (failure.for_user or failure.likely_to_repeat):
            return False

        last, counts = self._before_resize
        same_nodes = counts.keys() == self._cluster.wanted.keys()
        return attempt.number == last + 1 and same_nodes and saved == attempt.started_from

    def _return_to_size(self, failure: Failure, attempt: Attempt) -> None:
        """Report the failure, and have the next attempt run as many ranks as before the resize."""
        assert self._before_resize is not None
        refused = self._cluster.world_size
        self._cluster.wanted = dict(self._before_resize[1])
        self._before_resize = None
        world_size = self._cluster.world_size
        self._report(failure, attempt)
        self._outbox.say(f"not resized to {plural(refused, 'rank')}: continuing with {plural(world_size, 'rank')}")
        self._log_resize(refused)
