"""Which checkpoints stay."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep.checkpoint.manifest import Damaged, read_manifest
from lockstep.checkpoint.storage import Store, step_number
from lockstep.errors import UserError


@dataclass(frozen=True)
class Retention:
    """The newest `last`, those of steps divisible by `every`, and the one whose metric `best` is best."""

    last: int = 3
    every: int | None = None
    best: str | None = None
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.last < 1 or (self.every is not None and self.every < 1):
            found = f"last = {self.last}, every = {self.every}"
            raise UserError("which checkpoints to keep", found, "use counts of 1 or more")
        if self.mode not in ("min", "max"):
            raise UserError("which checkpoint is best", f"mode = {self.mode!r}", 'use "min" or "max"')


def to_delete(checkpoints: Sequence[tuple[int, Mapping[str, Any]]], retention: Retention) -> list[int]:
    """The steps to delete, oldest first; `checkpoints` are (step, metrics). The newest always stays."""
    steps = sorted(step for step, _ in checkpoints)
    keep = set(steps[-retention.last :])
    if retention.every:
        keep |= {step for step in steps if step % retention.every == 0}
    if retention.best is not None:
        sign = 1 if retention.mode == "max" else -1
        scores = [(_score(metrics.get(retention.best)), step) for step, metrics in checkpoints]
        ranked = [(sign * score, step) for score, step in scores if score is not None]
        keep |= {step for _, step in sorted(ranked)[-1:]}  # of equals, the newest
    return [step for step in steps if step not in keep]


def apply(store: Store, retention: Retention, token: str) -> list[int]:
    """Delete what need not stay; the steps that are gone."""
    paths = {step_number(path): path for path in store.committed()}
    known = [(step, _metrics(path) if retention.best else {}) for step, path in paths.items()]
    doomed = to_delete(known, retention)
    for step in doomed:
        store.remove(paths[step], token)
    return doomed


def _metrics(path: Path) -> Mapping[str, Any]:
    try:
        return read_manifest(path).metrics
    except Damaged:  # it has no score; whether it goes, its age decides
        return {}


def _score(metric: Any) -> float | None:
    """NaN is never best, and neither is what is no number."""
    is_number = isinstance(metric, int | float) and not isinstance(metric, bool) and not math.isnan(metric)
    return metric if is_number else None
