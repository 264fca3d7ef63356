"""The save in flight, seen from the training loop: all ranks learn together whether it is committed or aborted.

A save fails on one rank, in its writing thread (`save.py`). The others learn of it in these steps:

    Save._fail                    sets the outcome, and deletes this rank's files of the draft
    PendingSave.poll              sees it after the next step, and the control word tells all ranks
    PendingSave.abort_if_failed   compares the failures of all ranks, and calls `Save.abort` on each: the save then
                                  fails on ranks on which it was still pending
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from lockstep.checkpoint.saving.draft import SaveContext
from lockstep.checkpoint.saving.outcome import Committed, SaveFailed
from lockstep.checkpoint.saving.save import Save
from lockstep.checkpoint.storage.folder import Checkpoint, list_checkpoints
from lockstep.checkpoint.storage.retry import backoff
from lockstep.errors import UserError
from lockstep.runtime.context import EventLogger, Runtime

MIB = 2**20

# How long training goes on after a save that failed, before the next try, in seconds. The pause doubles with each
# failure in a row, up to a limit: a file server is back soon, a full disk must not cost training its time, and a disk
# with room again must not wait for hours.
RETRY_S = 30.0
MAX_RETRY_S = 1800.0

# What the warning about a save that failed says of the run.
CONTINUES = "Training continues"
SAVES_AGAIN = "The run saves once more before it ends"
ENDS = "The run ends without it"


class PendingSave:
    """The save in flight, if there is one, until all ranks agree on its outcome. Only then does its checkpoint count.

    `settle` and `abort_if_failed` are collective; the other methods are local.
    """

    def __init__(
        self,
        context: SaveContext,
        runtime: Runtime,
        log_event: EventLogger,
        as_shown: Callable[[str | Path], str],
    ):
        """`as_shown(path)` returns a path as the user would write it."""
        self._context = context
        self._runtime = runtime
        self._log_event = log_event
        self._as_shown = as_shown

        # The save on whose outcome the ranks have not agreed yet; None: no save is in flight.
        self.save: Save | None = None
        self._logged = False  # whether its commit is logged

        # The metrics of an evaluation that came after the start of this save, until they are in its checkpoint.
        self._late_metrics: Mapping[str, float] | None = None

        # Why the last save has failed (None: it has not), and when to try again, by this rank's clock.
        self.failure: str | None = None
        self._retry_at = math.inf
        self._pauses = backoff(RETRY_S, MAX_RETRY_S)

        self._what_follows = CONTINUES  # if a save fails, for the warning

        # The step of the last checkpoint that is committed in this run's folder; None: there is none.
        self.last_committed: int | None = None
        self._last_time = time.monotonic()  # see `seconds_since_last`

    # ---- what happens in the run ----

    def note_begun(self, save: Save) -> None:
        """Take a save that has just begun for the one in flight. Call `settle` before it begins."""
        assert self.save is None, f"the save of step {self.save.step} is not settled"
        self.save = save
        self._logged = False
        self._late_metrics = None
        self._retry_at = math.inf
        self._last_time = time.monotonic()

    def note_loaded(self, step: int | None) -> None:
        """Take the checkpoint that was just loaded for the last one. None: this run does not keep it."""
        self.last_committed = step
        self._last_time = time.monotonic()

    def note_end(self, saves_again: bool) -> None:
        """Note that no step follows, so that the warning about a save that fails says whether it is tried again."""
        self._what_follows = SAVES_AGAIN if saves_again else ENDS

    # ---- what is saved, and when to save again ----

    def seconds_since_last(self) -> float:
        """Return how long ago a save began or a checkpoint was loaded; if neither has happened, the run's start."""
        return time.monotonic() - self._last_time

    def retry_due(self) -> bool:
        """Return whether to save again because the last save failed. Ask on one rank only: the clocks differ."""
        return time.monotonic() >= self._retry_at

    def has_step(self, step: int) -> bool:
        """Return whether the state after `step` steps is committed in this run's folder, or about to be."""
        return step == self.last_committed or (self.save is not None and step == self.save.step)

    @property
    def waits_for_retry(self) -> bool:
        """Whether the last save has failed, and none is in flight."""
        return self.failure is not None and self.save is None

    def last_location(self) -> str | None:
        """Return where the last committed checkpoint of this run is; None if there is none."""
        step = self.last_committed
        return None if step is None else str(Checkpoint.of(self._context.storage, step).path)

    # ---- the metrics of an evaluation ----

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Add the metrics of an evaluation to the checkpoint of this step. Return False if there is none yet.

        If it is still being written, they are added when it is committed.
        """
        if not self.has_step(step):
            return False

        if self.save is not None and self.save.step == step:
            self._late_metrics = metrics
        elif self._runtime.is_main:
            self._write_metrics(step, metrics)

        return True

    def _write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics into a committed checkpoint, on rank 0. A failure costs only the metrics."""
        try:
            self._context.check_owner()
            self._context.all_metrics.write(step, metrics)
        except (OSError, SaveFailed) as error:
            reason = f"the checkpoint of step {step} does not have the metrics of its evaluation: {error}"
            self._log_event("warning", reason=reason)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the save in flight: the late ones, if there are any; {} if no save is in flight."""
        if self.save is None:
            return {}

        return self.save.metrics if self._late_metrics is None else self._late_metrics

    # ---- the outcome ----

    def poll(self) -> bool:
        """Log the save if it is committed by now. Return whether it failed on this rank, for the control word."""
        if self.save is None:
            return False

        self._after_commit(self.save)
        return isinstance(self.save.outcome, SaveFailed)

    def settle(self) -> bool:
        """Wait until the save in flight, if there is one, is committed, or aborted. Return whether it was aborted."""
        if self.save is None:
            return False

        with self._runtime.heartbeat.visit("commit"):
            # First compare the files of all ranks; otherwise rank 0 would wait for the file of a rank that failed.
            self.save.wait_for_file()
            if self.abort_if_failed():
                return True

            # All files are written. Wait for the commit, which may still fail on rank 0.
            self.save.wait()
            self._after_commit(self.save)
            if self.abort_if_failed():
                return True

        self.last_committed = self.save.step
        self.save = None
        self.failure = None
        self._pauses = backoff(RETRY_S, MAX_RETRY_S)
        return False

    def abort_if_failed(self) -> bool:
        """Abort the save on all ranks if it failed on any of them. Return whether it was aborted.

        Training continues, and tries again after a while: a full disk costs a checkpoint, but not the run. Only if
        another attempt has taken over the run, all ranks raise a UserError: this one could never save again.
        """
        # What this rank knows: why the save failed here, whether another rank was the cause, and whether the run was
        # taken over.
        outcome = self.save.outcome if self.save else None
        failed = outcome if isinstance(outcome, SaveFailed) else SaveFailed("")
        reports = self._runtime.collectives.all_gather_json([failed.reason, failed.caused_elsewhere, failed.taken_over])

        failures = [(rank, why, elsewhere) for rank, (why, elsewhere, _) in enumerate(reports) if why]
        if not failures:
            # `settle` may already have handled it: the control word is one step late.
            return False

        # Name each cause once, with the rank on which it occurred.
        causes = [f"rank {rank}: {why}" for rank, why, elsewhere in failures if not elsewhere]
        reason = "; ".join(causes) or failures[0][1]
        assert self.save is not None

        # The thread may be in one slow write, for which training waits here: that is no hang of a step.
        with self._runtime.heartbeat.visit("commit"):
            self.save.abort(reason)

        self._retry_at = time.monotonic() + next(self._pauses)
        self.failure = reason
        step = self.save.step
        self.save = None
        if any(taken_over for _, _, taken_over in reports):
            raise taken_over_error(f"the checkpoint of step {step} was not written: {reason}")

        # The failure is logged here, once, with the reasons of all ranks.
        what = f"THE CHECKPOINT OF STEP {step} WAS NOT WRITTEN"
        self._log_event("warning", reason=f"{what}: {reason}. {self._what_follows}; {self._last_good()}")
        return True

    def _last_good(self) -> str:
        """Say which checkpoint remains after a failed save. The storage may be out of reach."""
        try:
            newest = list_checkpoints(self._context.storage)[:1]
        except OSError as error:
            return f"the checkpoints cannot be listed: {error}"

        return f"the last good one is {newest[0].name}" if newest else "there is no checkpoint yet"

    def close(self, timeout: float = 0.0) -> None:
        """Give the save `timeout` seconds to end, and log it if it is committed then. No save may follow."""
        if self.save is not None and self.save.wait(timeout):
            self._after_commit(self.save)

    def _after_commit(self, save: Save) -> None:
        """Log the save once it is committed, and add metrics that came after its start.

        `abort_if_failed` logs failures, after all ranks have compared them.
        """
        # After the commit, the thread still deletes old checkpoints, and may add a warning.
        if not save.wait(0) or not isinstance(save.outcome, Committed):
            return

        if not self._logged:
            self._log_commit(save, save.outcome)
            self._logged = True

        if self._late_metrics is not None:
            self._write_metrics(save.step, self._late_metrics)
            self._late_metrics = None

    def _log_commit(self, save: Save, outcome: Committed) -> None:
        for warning in outcome.warnings:
            self._log_event("warning", reason=warning)

        self._log_event(
            "checkpoint",
            step=save.step,
            path=self._as_shown(outcome.checkpoint.path),
            mb=outcome.total_bytes / MIB,
            stall_s=save.stall_s,
            write_s=save.write_s,
        )


def taken_over_error(found: str) -> UserError:
    """Return the error with which an attempt ends that no longer owns its run."""
    return UserError(
        "another attempt has taken over this run, and continues it: this one ends",
        found,
        "look for a second process that trains in this run_dir; if there is none, add --resume RUN to resume the run",
    )
