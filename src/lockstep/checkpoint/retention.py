"""Which checkpoints are kept: the newest, some in between, and the best. All others are deleted.

This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from lockstep.checkpoint.metrics import CheckpointMetrics
from lockstep.checkpoint.storage import Checkpoint, committed, delete_checkpoint
from lockstep.config import yaml_dialect
from lockstep.config.sections import CheckpointConfig
from lockstep.run_folder.checkpoint_names import folder_name


@dataclass(frozen=True)
class Retention:
    """The rule by which checkpoints are kept, as the settings of the same names say. All others are deleted."""

    keep: int = 3  # how many of the newest checkpoints to keep
    keep_every: int | None = None  # also keep checkpoints whose step is a multiple of this
    best: str | None = None  # also keep the checkpoint with the best value of this metric
    best_mode: Literal["min", "max"] = "min"  # whether the smallest or the largest value is best

    @classmethod
    def from_settings(cls, settings: CheckpointConfig) -> Retention:
        """Return the rule of a run with these settings."""
        return cls(settings.keep, settings.keep_every, settings.best, settings.best_mode)

    @classmethod
    def from_saved(cls, settings: Mapping[str, str]) -> Retention:
        """Return the rule of a run that has saved these settings (`Manifest.settings`), except `keep`."""
        names = [name for name in ("keep_every", "best", "best_mode") if f"checkpoint.{name}" in settings]
        values = {name: yaml_dialect.word(settings[f"checkpoint.{name}"]) for name in names}

        # Another version may have written something else.
        try:
            saved = CheckpointConfig(**values)
        except ValidationError:
            return cls()

        return cls(keep_every=saved.keep_every, best=saved.best, best_mode=saved.best_mode)

    def __post_init__(self) -> None:
        # The configuration and `lockstep ckpt prune` check what users type.
        assert self.keep >= 1, self
        assert self.keep_every is None or self.keep_every >= 1, self

    def score(self, metrics: Mapping[str, Any]) -> float | None:
        """Return a number that is larger for better metrics; None if there is none, or it is NaN."""
        value = metrics.get(self.best) if self.best is not None else None
        if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
            return None

        return value if self.best_mode == "max" else -value


def steps_to_delete(metrics: Mapping[int, Mapping[str, Any]], retention: Retention) -> list[int]:
    """Return the steps to delete, oldest first, and never the newest. `metrics`: of all checkpoints, by step."""
    steps = sorted(metrics)
    kept = set(steps[-retention.keep :])

    if retention.keep_every:
        kept |= {step for step in steps if step % retention.keep_every == 0}

    best = best_step(metrics, retention)
    return [step for step in steps if step not in kept and step != best]


def best_step(metrics: Mapping[int, Mapping[str, Any]], retention: Retention) -> int | None:
    """Return the step that is best by `retention.best`, the newest of equals; None if no step can be compared."""
    scores = []
    for step in metrics:
        score = retention.score(metrics[step])
        if score is not None:
            scores.append((score, step))

    return max(scores)[1] if scores else None


# ---- in a storage ----


def apply_retention(known: CheckpointMetrics, retention: Retention, token: str) -> None:
    """Delete the checkpoints that `retention` does not keep. Raises the errors of `CheckpointMetrics.by_step`."""
    # Manifests are read only if the best metric is kept.
    if retention.best:
        metrics = known.by_step()
    else:
        metrics = {checkpoint.step: {} for checkpoint in committed(known.storage)}

    for step in steps_to_delete(metrics, retention):
        delete_checkpoint(known.storage, folder_name(step), token)


class BestCheckpoint(NamedTuple):
    """A checkpoint, and the value of the metric by which it is the best."""

    checkpoint: Checkpoint
    metric: str
    value: float


def best_checkpoint(known: CheckpointMetrics, retention: Retention) -> BestCheckpoint | None:
    """Return the committed checkpoint that is best by `retention.best`; None if none has a value.

    Raises the errors of `CheckpointMetrics.by_step`.
    """
    if retention.best is None:
        return None

    metrics = known.by_step()
    step = best_step(metrics, retention)
    if step is None:
        return None

    return BestCheckpoint(Checkpoint.of(known.storage, step), retention.best, metrics[step][retention.best])
