"""Choose the checkpoint that a path means: the checkpoint at this path, or the newest, the best or any one of a run.

All commands ask here. This module does not import torch. What the path itself means is in `run_folder/paths.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.checkpoint.manifest import InvalidCheckpoint
from lockstep.checkpoint.manifest_reader import read_manifest
from lockstep.checkpoint.metrics import CheckpointMetrics
from lockstep.checkpoint.retention import best_checkpoint, saved_retention
from lockstep.checkpoint.storage.folder import Checkpoint, CheckpointStorage, list_checkpoints
from lockstep.config.sections import CheckpointConfig
from lockstep.errors import UserError
from lockstep.run_folder.paths import read_path


def checkpoints_at(path: Path) -> tuple[CheckpointStorage, str | None]:
    """Return the storage that `path` names, and the name of the checkpoint; the name is None if `path` is a run."""
    meant = read_path(path)
    return CheckpointStorage(meant.checkpoints), meant.name


def storage_of(path: Path) -> CheckpointStorage:
    """Return the storage of the checkpoints of the run at `path`. Raise a UserError."""
    storage, name = checkpoints_at(path)
    if name is None and storage.root.is_dir():
        return storage

    if name is not None:
        why = "is one checkpoint, and not a run"
    else:
        why = "has no folder checkpoints" if path.is_dir() else "does not exist"

    raise UserError(f"{path} {why}", "", "give the folder of a run, such as runs/char_lm-...")


def run_folder_of(path: Path) -> Path:
    """Return the folder of the run to which `path` belongs; for a checkpoint elsewhere, the folder above its own."""
    meant = read_path(path)
    return meant.run or meant.checkpoints.absolute().parent


def choose(path: Path, step: int | None = None, best: bool = False) -> Checkpoint:
    """Return the checkpoint at `path`. If `path` is a run, return its checkpoint of `step`, its best, or its newest."""
    storage, name = checkpoints_at(path)
    if name is not None:
        if best or step is not None:
            raise no_choice_error(path)

        return Checkpoint(storage, name)

    storage = storage_of(path)
    if best:
        return _best(path, storage)

    checkpoints = list_checkpoints(storage)
    if not checkpoints:
        raise UserError(f"{path} has no committed checkpoint", "", "choose another run folder")

    if step is None:
        return checkpoints[0]

    by_step = {checkpoint.step: checkpoint for checkpoint in checkpoints}
    if step not in by_step:
        steps = ", ".join(map(str, sorted(by_step)))
        raise UserError(f"{path} has no checkpoint of step {step}", f"it has steps {steps}", "use one of them")

    return by_step[step]


def no_choice_error(path: Path) -> UserError:
    """Return the error for a path that is not a run, where the user asked for a step or for the best."""
    return UserError(f"{path} is not a run, so it has no steps to choose from", "", "leave --best or --step out")


def _best(path: Path, storage: CheckpointStorage) -> Checkpoint:
    """Return the best checkpoint of the run at `path`, by its setting `checkpoint.best`."""
    try:
        best = best_checkpoint(CheckpointMetrics(storage), retention_of(list_checkpoints(storage)))
    except OSError as error:
        raise UserError(
            f"the checkpoints of {path} cannot be compared now",
            str(error),
            "try again, or choose one by its step: lockstep ckpt ls RUN",
        ) from None

    if best is None:
        raise UserError(
            f"{path} has no best checkpoint",
            "its newest checkpoint was saved without checkpoint.best, or none has an evaluation",
            "choose one by its step: lockstep ckpt ls RUN",
        )

    return best.checkpoint


def retention_of(checkpoints: Sequence[Checkpoint]) -> CheckpointConfig:
    """Return which checkpoints a run keeps, by the settings in its newest checkpoint with a valid manifest."""
    for checkpoint in checkpoints:
        with suppress(InvalidCheckpoint):
            return saved_retention(read_manifest(checkpoint).settings)

    return CheckpointConfig()
