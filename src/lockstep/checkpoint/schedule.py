"""When a checkpoint is saved: after so many steps, after so many minutes, or after the best evaluation so far.

Other saves are requested: by the user's code, by a preemption, by the end of the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from lockstep.checkpoint.retention import Retention, best_checkpoint
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.config.sections import CheckpointConfig
from lockstep.runtime.context import Runtime


class SaveSchedule:
    """Says when a save is due. The manager reports what it saves and loads (`started`, `aborted`, `loaded`)."""

    def __init__(self, settings: CheckpointConfig, retention: Retention, storage: CheckpointStorage, runtime: Runtime):
        self._settings = settings
        self._retention = retention
        self._storage = storage
        self._runtime = runtime

        # How many steps were done at the last save that was started, or in the last checkpoint that was loaded from
        # this run's folder. None: that state must be saved again, since its save was aborted, or it is in another run.
        self._last_started: int | None = None

        # When a checkpoint was last saved or loaded, or else the run began.
        self._last_time = time.monotonic()

        # The score (`Retention.score`) of the best checkpoint; None: not known, to be looked up.
        self._best_score: float | None = None

    # ---- is a save due? ----

    def due(self, steps_done: int, requested: bool) -> bool:
        """Whether to save now: a rank `requested` it, or `steps_done` is a multiple of `checkpoint.every`. Local.

        The same state is never saved twice.
        """
        if steps_done == self._last_started:
            return False

        every = self._settings.every
        return requested or (every is not None and steps_done % every == 0)

    def due_by_clock(self) -> bool:
        """Whether rank 0's clock requests a checkpoint; the control word carries the request. Local."""
        # Clocks differ between machines, so only rank 0's is used.
        minutes = self._settings.minutes
        if minutes is None or not self._runtime.is_main:
            return False

        return time.monotonic() - self._last_time > 60 * minutes

    def is_new_best(self, metrics: Mapping[str, float]) -> bool:
        """Return whether these metrics are better than those of all checkpoints by `checkpoint.best`. Collective.

        All ranks get the same answer, because rank 0 alone looks at the checkpoints.
        """
        score = self._retention.score(metrics)
        if score is None:
            return False

        if self._best_score is None:
            self._best_score = self._runtime.collectives.run_on_rank0(self._look_up_best)

        # If it cannot be looked up now, the next evaluation tries again.
        return self._best_score is not None and score > self._best_score

    def _look_up_best(self) -> float | None:
        """Return the score of the best checkpoint so far, which is -inf if there is none. Rank 0 calls it.

        Return None if the checkpoints cannot be listed or read, which must not end the run.
        """
        try:
            best = best_checkpoint(self._storage, self._retention)
        except OSError:
            return None

        return -math.inf if best is None else self._retention.score({best.metric: best.value})

    # ---- what was saved or loaded ----

    def started(self, steps_done: int, metrics: Mapping[str, float]) -> None:
        """Note that a save with these metrics has begun. Collective."""
        self._last_started = steps_done
        self._last_time = time.monotonic()

        if self.is_new_best(metrics):
            self._best_score = self._retention.score(metrics)

    def aborted(self) -> None:
        """Note that the last save was not committed: the same state may be saved again."""
        self._last_started = None
        self._best_score = None

    def loaded(self, steps_done: int | None) -> None:
        """Note that the state after `steps_done` steps was loaded; None if it is not in this run's folder."""
        self._last_started = steps_done
        self._last_time = time.monotonic()
        self._best_score = None
