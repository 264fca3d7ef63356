"""Choose which checkpoints are kept: the newest, some in between, and the best. All others are deleted.

This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from lockstep.checkpoint.metrics import CheckpointMetrics
from lockstep.checkpoint.storage.folder import Checkpoint, list_checkpoints
from lockstep.checkpoint.storage.transitions import delete_all
from lockstep.config import yaml_dialect
from lockstep.config.sections import CheckpointConfig
from lockstep.run_folder.checkpoint_names import folder_name

# The keys below `checkpoint` that `steps_to_delete` follows.
RETENTION_KEYS = ("keep", "keep_every", "best", "best_mode")


def saved_retention(settings: Mapping[str, str]) -> CheckpointConfig:
    """Return which checkpoints a run with these settings keeps (`Manifest.settings`)."""
    names = [name for name in RETENTION_KEYS if f"checkpoint.{name}" in settings]
    values = {name: yaml_dialect.word(settings[f"checkpoint.{name}"]) for name in names}

    # Another version may have written something else.
    try:
        return CheckpointConfig(**values)
    except ValidationError:
        return CheckpointConfig()


def score(config: CheckpointConfig, metrics: Mapping[str, Any]) -> float | None:
    """Return a number that is larger for better metrics, by `config.best`; None if the metric is missing or NaN."""
    value = metrics.get(config.best) if config.best is not None else None
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        return None

    return value if config.best_mode == "max" else -value


def steps_to_delete(metrics_by_step: Mapping[int, Mapping[str, Any]], config: CheckpointConfig) -> list[int]:
    """Return the steps to delete, oldest first, and never the newest. `metrics_by_step`: of all checkpoints."""
    steps = sorted(metrics_by_step)
    kept = set(steps[-config.keep :])

    if config.keep_every:
        kept |= {step for step in steps if step % config.keep_every == 0}

    best = best_step(metrics_by_step, config)
    return [step for step in steps if step not in kept and step != best]


def best_step(metrics_by_step: Mapping[int, Mapping[str, Any]], config: CheckpointConfig) -> int | None:
    """Return the step that is best by `config.best`, the newest of equals; None if no step can be compared."""
    scores = []
    for step in metrics_by_step:
        step_score = score(config, metrics_by_step[step])
        if step_score is not None:
            scores.append((step_score, step))

    return max(scores)[1] if scores else None


# ---- in a storage ----


def apply_retention(all_metrics: CheckpointMetrics, config: CheckpointConfig, token: str) -> OSError | None:
    """Delete the checkpoints that `config` does not keep. Return the first error of a deletion, if there is one.

    Raise the errors of `CheckpointMetrics.by_step`.
    """
    # Metrics are read only if the best checkpoint is kept.
    if config.best:
        metrics_by_step = all_metrics.by_step()
    else:
        metrics_by_step = {checkpoint.step: {} for checkpoint in list_checkpoints(all_metrics.storage)}

    names = [folder_name(step) for step in steps_to_delete(metrics_by_step, config)]
    return delete_all(all_metrics.storage, names, token)


class BestCheckpoint(NamedTuple):
    """A checkpoint, and the value of the metric by which it is the best."""

    checkpoint: Checkpoint
    metric: str
    value: float


def best_checkpoint(all_metrics: CheckpointMetrics, config: CheckpointConfig) -> BestCheckpoint | None:
    """Return the committed checkpoint that is best by `config.best`; None if none has a value.

    Raise the errors of `CheckpointMetrics.by_step`.
    """
    if config.best is None:
        return None

    metrics_by_step = all_metrics.by_step()
    step = best_step(metrics_by_step, config)
    if step is None:
        return None

    return BestCheckpoint(Checkpoint.of(all_metrics.storage, step), config.best, metrics_by_step[step][config.best])
