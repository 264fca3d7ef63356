"""The weights of a checkpoint, for other programs: which checkpoint is meant, and its tensors without the optimizers'.

`lockstep ckpt export`, `lockstep evaluate`, the end of a run and the export for Hugging Face use this. Only what reads
tensors imports torch, when it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.checkpoint.manifest import EMA, MODEL, InvalidCheckpoint
from lockstep.checkpoint.manifest_reader import read_manifest
from lockstep.checkpoint.metrics import CheckpointMetrics
from lockstep.checkpoint.retention import Retention, best_checkpoint
from lockstep.checkpoint.storage import Checkpoint, CheckpointStorage, checkpoints_at, committed
from lockstep.checkpoint.verify import verify_checkpoint
from lockstep.errors import UserError
from lockstep.run_folder.names import AVERAGED_WEIGHTS, WEIGHTS
from lockstep.run_folder.paths import read_path

# `export` writes the tensors whose names begin with this.
_PREFIX = f"{MODEL}."
_AVERAGE = f"{EMA}."  # with --ema, those that begin with this take the place of the model's, where there are any


class Weights(NamedTuple):
    """The weights in a checkpoint."""

    tensors: dict[str, Any]  # tied ones once
    aliases: dict[str, str]  # of tied tensors: {other name: name in `tensors`}
    frozen_digests: dict[str, str]  # of the frozen parameters that the checkpoint leaves out (checkpoint.frozen=false)


def export_weights(checkpoint: Checkpoint, out: Path, ema: bool = False) -> Path:
    """Verify every byte, and write the tensors `model.*` to `out` or to `out`/model.safetensors.

    Tied weights are written once; the metadata maps their other names to that name. With `ema` the averages take the
    place of the parameters, and the file is called ema.safetensors.
    """
    from lockstep.observe.weights import write_weights  # needs torch

    weights = read_weights(checkpoint, ema)
    if not weights.tensors:
        raise UserError(
            f"the checkpoint {checkpoint.path} has no weights to export",
            f"no tensor whose name begins with {_PREFIX!r}",
            "list its tensors: lockstep ckpt show CKPT",
        )

    # An older file is replaced completely or not at all.
    name = AVERAGED_WEIGHTS if ema else WEIGHTS
    target = out if out.suffix == ".safetensors" else out / name
    target.parent.mkdir(parents=True, exist_ok=True)
    write_weights(target, weights.tensors, weights.aliases)
    return target


def read_weights(checkpoint: Checkpoint, ema: bool = False) -> Weights:
    """Verify every byte, and return the tensors `model.*` without that prefix.

    With `ema` the averages of parameters take their places.
    """
    from lockstep.checkpoint.reader import CheckpointReader  # needs torch

    tensors = {}
    aliases = {}

    try:
        manifest, problems = verify_checkpoint(checkpoint)
        if manifest is None or problems:
            raise problems[0]

        reader = CheckpointReader(checkpoint, manifest)

        averages = {name.removeprefix(_AVERAGE) for name in reader.names() if name.startswith(_AVERAGE)}
        if ema and not averages:
            raise UserError(
                f"the checkpoint {checkpoint.path} has no averages of the weights",
                "it was saved without ema.decay",
                "leave --ema out; a run with ema.decay=0.999 saves them",
            )

        # Parameters and buffers. Those without an average are read from the model's tensors.
        with reader.keeping_open():
            for full_name in [name for name in reader.names() if name.startswith(_PREFIX)]:
                name = full_name.removeprefix(_PREFIX)
                original = reader.original(full_name)

                # If a tensor is tied to a tensor outside the model, it is written itself.
                if original != full_name and original.startswith(_PREFIX):
                    aliases[name] = original.removeprefix(_PREFIX)
                else:
                    tensors[name] = reader.read(f"{_AVERAGE}{name}" if ema and name in averages else full_name)
    except InvalidCheckpoint as problem:
        raise UserError(
            f"the checkpoint {checkpoint.path} {problem.verdict} and cannot be exported",
            str(problem),
            "choose another checkpoint: lockstep ckpt ls RUN",
        ) from None

    return Weights(tensors, aliases, manifest.frozen_digests)


def choose(path: Path, step: int | None = None, best: bool = False) -> Checkpoint:
    """Return the checkpoint at `path`. If `path` is a run, return its checkpoint of `step`, its best, or its newest."""
    if best:
        return _best(path)

    storage, name = checkpoints_at(path)
    if name is not None and step is None:
        return Checkpoint(storage, name)

    checkpoints = {checkpoint.step: checkpoint for checkpoint in committed(storage_of(path))}
    if not checkpoints:
        raise UserError(f"{path} has no committed checkpoint", "", "choose another run folder")

    chosen = max(checkpoints) if step is None else step
    if chosen not in checkpoints:
        steps = ", ".join(map(str, sorted(checkpoints)))
        raise UserError(f"{path} has no checkpoint of step {step}", f"it has steps {steps}", "use one of them")

    return checkpoints[chosen]


def _best(path: Path) -> Checkpoint:
    """Return the best checkpoint of the run at `path`, by its setting `checkpoint.best`."""
    storage = storage_of(path)
    try:
        best = best_checkpoint(CheckpointMetrics(storage), retention_of(committed(storage)))
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


def retention_of(checkpoints: Sequence[Checkpoint]) -> Retention:
    """Return the rule of a run, except `keep`, as the settings in its newest checkpoint with a valid manifest say."""
    for checkpoint in checkpoints:
        with suppress(InvalidCheckpoint):
            return Retention.from_saved(read_manifest(checkpoint).settings)

    return Retention()


def storage_of(path: Path) -> CheckpointStorage:
    """Return the storage of the checkpoints of the run at `path`. Raises a UserError."""
    storage, name = checkpoints_at(path)
    if name is None and storage.root.is_dir():
        return storage

    why = "has no folder checkpoints" if path.is_dir() else "does not exist"
    raise UserError(f"{path} {why}", "", "give the folder of a run, such as runs/char_lm-...")


def run_folder_of(path: Path) -> Path:
    """Return the folder of the run to which `path` belongs; for a checkpoint elsewhere, that above its folder."""
    meant = read_path(path)
    return meant.run or meant.checkpoints.absolute().parent
