"""Whether to save after a step, and after the last one.

Two saves are not decided here: the first one of a run that rewinds (`Rewinder.ensure_checkpoint`), and the second try
of the last one (`engine/end.py`).

Some reasons are known to one rank. It requests the save in its control word, and acts only when all ranks have agreed:

    run.save()                            on any rank
    a notice of Ray Train                 on any rank
    `checkpoint.minutes`                  by the clock of rank 0
    another try after a save that failed  by the clock of rank 0

Others are known to all ranks: `checkpoint.every`, an evaluation that is the best so far (`checkpoint.best`;
`note_evaluation` compares it), a preemption, and the end of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from lockstep.checkpoint.metrics import CheckpointMetrics
from lockstep.checkpoint.retention import score
from lockstep.checkpoint.saving.pending import PendingSave
from lockstep.config import RunConfig
from lockstep.runtime.context import EventLogger, Runtime


class SaveDecision:
    """Decides when to save. `is_due` and `is_due_at_end` give the same answer on every rank.

    All methods are local, except `note_evaluation`.
    """

    def __init__(
        self,
        config: RunConfig,
        runtime: Runtime,
        pending: PendingSave,
        all_metrics: CheckpointMetrics,
        log_event: EventLogger,
        set_save_flag: Callable[[bool], None],
    ):
        """`set_save_flag(value)` sets whether this rank's next control word requests a save."""
        self._config = config.checkpoint
        self._runtime = runtime
        self._pending = pending
        self._all_metrics = all_metrics
        self._log_event = log_event
        self._set_save_flag = set_save_flag

        # Whether the settings ask for any save. The user's code and signals may ask for one in any run.
        rewinds = "rewind" in (config.nonfinite.policy, config.spike.policy)
        chosen = self._config
        self.settings_ask = bool(chosen.every or chosen.minutes or chosen.at_end or chosen.best or rewinds)

        self.agreed = False  # whether all ranks know of a request that is not carried out yet
        self._requested = False  # by the user's code on this rank
        self._said_best_unknown = False  # whether a warning says that the best checkpoint cannot be looked up

    # ---- on one rank ----

    def request(self) -> None:
        """Request a save from all ranks, in the control word of this step and until one is made: `run.save()`."""
        self._requested = True
        self._set_save_flag(True)

    def request_if_due(self) -> None:
        """After a step, request a save in the next control word if this rank knows a reason to save."""
        # The clocks of machines differ, so only rank 0's counts.
        by_clock = self._runtime.is_main and (self._minutes_are_over() or self._pending.retry_due())
        self._set_save_flag(self._requested or by_clock or self._runtime.notice.asks_for_save())

    def _minutes_are_over(self) -> bool:
        minutes = self._config.minutes
        return minutes is not None and self._pending.seconds_since_last() > 60 * minutes

    # ---- on all ranks alike ----

    def agree(self) -> None:
        """Save after this step: the control word requested it, or an evaluation is the best so far."""
        self.agreed = True

    def note_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of an evaluation to the checkpoint of this step, or save this step if they are the best.

        The best checkpoint belongs to the best evaluation, so it is saved now, and not when the next save is due.
        Collective.
        """
        if self._pending.add_metrics(step, metrics):
            return

        new_score = score(self._config, metrics)
        if new_score is None:
            return

        # Rank 0 alone looks at the checkpoints, so that all ranks get the same answer.
        best_score = self._runtime.collectives.run_on_rank0(self._best_score)
        if best_score is not None and new_score > best_score:
            self.agree()

    def _best_score(self) -> float | None:
        """Return the best score of all checkpoints and of the save in flight; -inf if none has a score.

        Return None if the checkpoints cannot be listed or read, which must not end the run: the next evaluation tries
        again. A warning says so, once until they can be read again.
        """
        try:
            saved = self._all_metrics.by_step()
        except OSError as error:
            if not self._said_best_unknown:
                reason = f"the last evaluation may be the best so far, but is not saved: {error}"
                self._log_event("warning", reason=reason)
                self._said_best_unknown = True

            return None

        self._said_best_unknown = False
        scores = [score(self._config, metrics) for metrics in (*saved.values(), self._pending.metrics)]
        return max((known for known in scores if known is not None), default=-math.inf)

    def is_due(self, step: int, preempted: bool) -> bool:
        """Return whether to save the state after `step` steps. No state is saved twice, unless its save was aborted."""
        every = self._config.every
        wanted = self.agreed or preempted or (every is not None and step % every == 0)
        return wanted and not self._pending.has_step(step)

    def is_due_at_end(self, step: int) -> bool:
        """Return whether to save the state after the last step. A save that failed is not left for later any more."""
        wanted = self.agreed or self._config.at_end or self._pending.waits_for_retry
        return wanted and not self._pending.has_step(step)

    def note_begun(self) -> None:
        """Forget all requests: a save has begun. One that raises has not carried them out."""
        self.agreed = False
        self._requested = False
        self._set_save_flag(False)
        self._runtime.notice.saved()
