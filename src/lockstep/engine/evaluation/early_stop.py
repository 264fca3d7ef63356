"""Early stopping: a run ends when its evaluations no longer improve, or when its time is over.

Evaluations give the same numbers on every rank, so all ranks decide alike without asking each other. Only rank 0 looks
at the clock; its request travels in the control word.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.config.sections import StopConfig
from lockstep.errors import UserError, nearest_name, plural


@dataclass
class EarlyStop:
    """The best evaluation so far, and how many have followed without an improvement. Saved with every checkpoint."""

    config: StopConfig
    best: float | None = None
    best_step: int = 0
    evaluations_since: int = 0

    def observe(self, results: Mapping[str, float], steps_done: int) -> None:
        """Compare the results of a new evaluation with the best ones."""
        if self.config.patience is None:
            return

        check_metric("stop.metric", self.config.metric, results)
        value = results[self.config.metric]

        # An equal value is no improvement, nor is one within `stop.min_delta`.
        if self._improves(value):
            self.best = value
            self.best_step = steps_done
            self.evaluations_since = 0
        else:
            self.evaluations_since += 1

    @property
    def reason(self) -> str | None:
        """The reason why the run should stop, or None if it should not."""
        patience = self.config.patience
        if patience is None or self.evaluations_since < patience:
            return None

        best = f"the best was {self.best:.6g} at step {self.best_step}" if self.best is not None else "none was finite"
        return f"{self.config.metric} has not improved in {plural(self.evaluations_since, 'evaluation')}: {best}"

    def time_is_over(self, seconds: float) -> bool:
        """Return whether a run that has taken this long has reached `stop.max_minutes`."""
        return self.config.max_minutes is not None and seconds >= 60 * self.config.max_minutes

    def _improves(self, value: float) -> bool:
        if not math.isfinite(value):
            return False

        if self.best is None:
            return True

        gain = self.best - value if self.config.mode == "min" else value - self.best
        return gain > self.config.min_delta

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "evaluations_since": self.evaluations_since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]
        self.best_step = state["best_step"]
        self.evaluations_since = state["evaluations_since"]


def check_metric(key: str, metric: str, results: Collection[str]) -> None:
    """Check that the setting `key` names a result of the evaluation."""
    if metric not in results:
        nearest = nearest_name(metric, results, cutoff=0.0)
        raise UserError(
            f"{key}={metric} is not a result of the evaluation",
            f"its results are {', '.join(results)}",
            f"set {key}={nearest}, or return the metric from eval_loss()",
        )
