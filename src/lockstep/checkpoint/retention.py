"""Which checkpoints are kept: the newest, some in between, and the best. All others are deleted.

This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from lockstep.checkpoint.metrics import CheckpointMetrics
from lockstep.checkpoint.storage.checkpoint import Checkpoint
from lockstep.checkpoint.storage.transitions import committed, delete_checkpoint
from lockstep.config import yaml_dialect
from lockstep.config.sections import CheckpointConfig
from lockstep.run_folder.checkpoint_names import folder_name

# The settings that `steps_to_delete` follows.
RULES = ("keep", "keep_every", "best", "best_mode")


def saved_rules(settings: Mapping[str, str]) -> CheckpointConfig:
    """Return the rules of a run that has saved these settings (`Manifest.settings`)."""
    names = [name for name in RULES if f"checkpoint.{name}" in settings]
    values = {name: yaml_dialect.word(settings[f"checkpoint.{name}"]) for name in names}

    # Another version may have written something else.
    try:
        return CheckpointConfig(**values)
    except ValidationError:
        return CheckpointConfig()


def score(rules: CheckpointConfig, metrics: Mapping[str, Any]) -> float | None:
    """Return a number that is larger for better metrics by `rules.best`; None if there is none, or it is NaN."""
    value = metrics.get(rules.best) if rules.best is not None else None
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        return None

    return value if rules.best_mode == "max" else -value


def steps_to_delete(metrics: Mapping[int, Mapping[str, Any]], rules: CheckpointConfig) -> list[int]:
    """Return the steps to delete, oldest first, and never the newest. `metrics`: of all checkpoints, by step."""
    steps = sorted(metrics)
    kept = set(steps[-rules.keep :])

    if rules.keep_every:
        kept |= {step for step in steps if step % rules.keep_every == 0}

    best = best_step(metrics, rules)
    return [step for step in steps if step not in kept and step != best]


def best_step(metrics: Mapping[int, Mapping[str, Any]], rules: CheckpointConfig) -> int | None:
    """Return the step that is best by `rules.best`, the newest of equals; None if no step can be compared."""
    scores = []
    for step in metrics:
        found = score(rules, metrics[step])
        if found is not None:
            scores.append((found, step))

    return max(scores)[1] if scores else None


# ---- in a storage ----


def apply_retention(known: CheckpointMetrics, rules: CheckpointConfig, token: str) -> None:
    """Delete the checkpoints that `rules` do not keep. Raises the errors of `CheckpointMetrics.by_step`."""
    # Metrics are read only if the best checkpoint is kept.
    if rules.best:
        metrics = known.by_step()
    else:
        metrics = {checkpoint.step: {} for checkpoint in committed(known.storage)}

    for step in steps_to_delete(metrics, rules):
        delete_checkpoint(known.storage, folder_name(step), token)


class BestCheckpoint(NamedTuple):
    """A checkpoint, and the value of the metric by which it is the best."""

    checkpoint: Checkpoint
    metric: str
    value: float


def best_checkpoint(known: CheckpointMetrics, rules: CheckpointConfig) -> BestCheckpoint | None:
    """Return the committed checkpoint that is best by `rules.best`; None if none has a value.

    Raises the errors of `CheckpointMetrics.by_step`.
    """
    if rules.best is None:
        return None

    metrics = known.by_step()
    step = best_step(metrics, rules)
    if step is None:
        return None

    return BestCheckpoint(Checkpoint.of(known.storage, step), rules.best, metrics[step][rules.best])
