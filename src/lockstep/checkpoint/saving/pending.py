"""The save in flight, seen from the training loop: all ranks learn together whether it is committed or aborted.

A save fails on one rank, in its writing thread (`save.py`). The others learn of it in these steps:

    Save.fail                     sets the outcome, and deletes this rank's files of the draft
    PendingSave.poll              sees it after the next step, and the control word tells all ranks
    PendingSave.abort_if_failed   compares the failures of all ranks, and calls `Saver.abort` on each: the save then
                                  fails on ranks on which it was still pending
"""

from __future__ import annotations

from collections.abc import Callable

from lockstep.checkpoint.saving.outcome import Committed
from lockstep.checkpoint.saving.save import Save
from lockstep.checkpoint.saving.saver import Contents, Saver
from lockstep.checkpoint.storage import CheckpointStorage, committed
from lockstep.runtime.context import EventLogger, Runtime

MIB = 2**20


class PendingSave:
    """At most one save, from its start until all ranks agree on its outcome. A checkpoint counts only then.

    `settle` and `abort_if_failed` are collective; the other methods are local.
    """

    def __init__(
        self,
        saver: Saver,
        storage: CheckpointStorage,
        runtime: Runtime,
        log_event: EventLogger,
        as_shown: Callable[[str], str],
    ):
        """`as_shown(location)` returns a location as the user would write it."""
        self._saver = saver
        self._storage = storage
        self._runtime = runtime
        self._log_event = log_event
        self._as_shown = as_shown

        # How many steps were done at the save in flight; None: no save is in flight.
        self.steps_done: int | None = None

        # How many steps were done at the last checkpoint that is committed in this run's folder; None: there is none.
        self.last_committed: int | None = None

    def start(self, steps_done: int, contents: Contents) -> None:
        """Copy this rank's contents, and begin to write them. Call `settle` first."""
        assert self.steps_done is None, f"the save of step {self.steps_done} is not settled"
        self._saver.start(steps_done, contents)
        self.steps_done = steps_done

    def poll(self) -> bool:
        """Log a save that is committed by now. Return whether the save failed on this rank, for the control word."""
        if self.steps_done is None:
            return False

        self._log_committed(self._saver.take_ended(0))
        return self._saver.failure is not None

    def settle(self) -> bool:
        """Wait until the save in flight is committed, or aborted on all ranks. Return whether it was committed."""
        with self._runtime.heartbeat.visit("commit"):
            # First compare the files of all ranks; otherwise rank 0 would wait for the file of a rank that failed.
            self._saver.wait_for_own_file()
            if self.abort_if_failed():
                return False

            # All files are written. Wait for the commit, which may still fail on rank 0.
            self._log_committed(self._saver.take_ended())
            if self.abort_if_failed():
                return False

        self.last_committed = self.steps_done
        self.steps_done = None
        return True

    def abort_if_failed(self) -> bool:
        """Abort the save on all ranks if it failed on any of them. Return whether it was aborted.

        Training continues: a full disk costs a checkpoint, but not the run.
        """
        # What this rank knows: why the save failed here, and whether another rank was the cause.
        failed = self._saver.failure

        report = [failed.reason, failed.caused_elsewhere] if failed else [None, False]
        reports = self._runtime.collectives.gather_json(report)

        failures = [(rank, why, elsewhere) for rank, (why, elsewhere) in enumerate(reports) if why]
        if not failures:
            # `settle` may already have handled it: the control word is one step late.
            return False

        # Name each cause once, with the rank on which it occurred.
        causes = [f"rank {rank}: {why}" for rank, why, elsewhere in failures if not elsewhere]
        reason = "; ".join(causes) or failures[0][1]
        self._saver.abort(reason)

        # The failure is logged here, once, with the reasons of all ranks.
        self._log_event(
            "warning",
            reason=f"THE CHECKPOINT OF STEP {self.steps_done} WAS NOT WRITTEN: {reason}. Training continues; "
            f"{self._last_good()}",
        )
        self.steps_done = None
        return True

    def _last_good(self) -> str:
        """Say which checkpoint remains after a failed save. The storage may be out of reach."""
        try:
            newest = committed(self._storage)[:1]
        except OSError as error:
            return f"the checkpoints cannot be listed: {error}"

        return f"the last good one is {newest[0].name}" if newest else "there is no checkpoint yet"

    def close(self, timeout: float) -> None:
        """Give the save `timeout` seconds to end, then abort it. No save may follow."""
        self._log_committed(self._saver.take_ended(timeout))
        self._saver.close()

    def _log_committed(self, saves: list[Save]) -> None:
        """Log the committed saves. `abort_if_failed` logs failures, after all ranks have compared them."""
        for save in saves:
            outcome = save.outcome
            if not isinstance(outcome, Committed):
                continue

            if outcome.warning:
                self._log_event("warning", reason=f"the checkpoint of step {save.step} is {outcome.warning}")

            self._log_event(
                "checkpoint",
                step=save.step,
                path=self._as_shown(outcome.checkpoint.location),
                mb=outcome.total_bytes / MIB,
                stall_s=save.stall_s,
                write_s=save.write_s,
            )
