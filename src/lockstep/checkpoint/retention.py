"""Which checkpoints are kept: the newest, some in between, and the best. All others are deleted.

This module does not import torch.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from lockstep.checkpoint.manifest import InvalidCheckpoint, Unreadable
from lockstep.checkpoint.manifest_reader import read_manifest
from lockstep.checkpoint.storage import Checkpoint, CheckpointStorage, committed, delete_checkpoint
from lockstep.launch.folder.checkpoint_names import folder_name


@dataclass(frozen=True)
class Retention:
    """The rule by which checkpoints are kept, as the settings of the same names say. All others are deleted."""

    keep: int = 3  # how many of the newest checkpoints to keep
    keep_every: int | None = None  # also keep checkpoints whose step is a multiple of this
    best: str | None = None  # also keep the checkpoint with the best value of this metric
    best_mode: Literal["min", "max"] = "min"  # whether the smallest or the largest value is best

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


def steps_to_delete(checkpoints: Sequence[tuple[int, Mapping[str, Any]]], retention: Retention) -> list[int]:
    """Return the steps to delete, oldest first, and never the newest. `checkpoints` are (step, metrics)."""
    steps = sorted(step for step, _ in checkpoints)
    kept = set(steps[-retention.keep :])

    if retention.keep_every:
        kept |= {step for step in steps if step % retention.keep_every == 0}

    best = best_step(checkpoints, retention)
    return [step for step in steps if step not in kept and step != best]


def best_step(checkpoints: Sequence[tuple[int, Mapping[str, Any]]], retention: Retention) -> int | None:
    """Return the step that is best by `retention.best`, the newest of equals; None if no step can be compared."""
    scores = []
    for step, metrics in checkpoints:
        score = retention.score(metrics)
        if score is not None:
            scores.append((score, step))

    return max(scores)[1] if scores else None


# ---- in a storage ----


def apply_retention(storage: CheckpointStorage, retention: Retention, token: str) -> None:
    """Delete the checkpoints that `retention` does not keep. Raise an OSError if they cannot be compared now."""
    checkpoints = {checkpoint.step: checkpoint for checkpoint in committed(storage)}

    # Manifests are read only if the best metric is kept.
    metrics = []
    for step, checkpoint in checkpoints.items():
        metrics.append((step, metrics_of(checkpoint) if retention.best else {}))

    for step in steps_to_delete(metrics, retention):
        delete_checkpoint(storage, checkpoints[step].name, token)


class BestCheckpoint(NamedTuple):
    """A checkpoint, and the value of the metric by which it is the best."""

    checkpoint: Checkpoint
    metric: str
    value: float


def best_checkpoint(storage: CheckpointStorage, retention: Retention) -> BestCheckpoint | None:
    """Return the committed checkpoint that is best by `retention.best`; None if none has a value.

    Raise an OSError if they cannot be listed or read now.
    """
    if retention.best is None:
        return None

    metrics = {checkpoint.step: metrics_of(checkpoint) for checkpoint in committed(storage)}
    step = best_step(list(metrics.items()), retention)
    if step is None:
        return None

    return BestCheckpoint(Checkpoint(storage, folder_name(step)), retention.best, metrics[step][retention.best])


def metrics_of(checkpoint: Checkpoint) -> Mapping[str, float]:
    """Return the metrics of a checkpoint. A damaged one has none, so only its age decides whether it is deleted.

    Raise an OSError if its manifest cannot be read now: it may be the best checkpoint.
    """
    try:
        return read_manifest(checkpoint).metrics
    except Unreadable as problem:
        raise OSError(errno.EIO, str(problem)) from problem
    except InvalidCheckpoint:
        return {}
