"""The command `lockstep ckpt`: the function of each action returns the text to print and the exit code.

Only `export` imports torch, when it is called, so that all other actions start fast.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.filesize import decimal as size_text

from lockstep.checkpoint.format import check_size
from lockstep.checkpoint.format import verify as verify_checkpoint
from lockstep.checkpoint.manifest import InvalidCheckpoint, Manifest
from lockstep.checkpoint.manifest_reader import read_manifest
from lockstep.checkpoint.retention import BestCheckpoint, Retention, best_checkpoint, steps_to_delete
from lockstep.checkpoint.storage import (
    Checkpoint,
    CheckpointStorage,
    ObjectStorage,
    committed,
    delete_checkpoint,
    open_storage,
)
from lockstep.errors import UserError, plural
from lockstep.launch.folder.checkpoint_names import MANIFEST, is_set_aside, step_in
from lockstep.observe.formats import columns

# How many tensors `show` lists, and how many checkpoints `ls` lists.
MAX_SHOWN = 200
MAX_LISTED = 1000

# `export` writes the tensors whose names begin with this.
_PREFIX = "model."
_AVERAGE = "ema."  # with --ema, those that begin with this take the place of the model's, where there are any


def ls(path: Path) -> tuple[str, int]:
    """List the checkpoints of a run. This reads only manifests and the sizes of files; `verify` reads all bytes."""
    storage = _storage(path)
    checkpoints = committed(storage)

    # If a manifest cannot be read now, no checkpoint is called the best; its own row says why.
    best = None
    with suppress(OSError):
        best = best_checkpoint(storage, _retention_of(checkpoints))

    rows = [_row(checkpoint, best) for checkpoint in checkpoints[:MAX_LISTED]]
    if not rows:
        return "no checkpoints", 0

    rest = f"\nand {len(checkpoints) - MAX_LISTED} older ones" if len(checkpoints) > MAX_LISTED else ""
    return columns([("step", "when", "size", "tensors", "metrics", "state"), *rows]) + rest, 0


def show(path: Path) -> tuple[str, int]:
    """Describe a checkpoint, or the newest checkpoint of a run, in detail."""
    checkpoint = choose(path)
    try:
        manifest = read_manifest(checkpoint)
    except InvalidCheckpoint as problem:
        return f"{problem.label}: {problem}", 1

    facts = [
        ("checkpoint", checkpoint.location),
        ("step", str(manifest.step)),
        ("when", _when(manifest)),
        ("lockstep", manifest.lockstep),
        ("size", f"{size_text(manifest.bytes)} in {plural(len(manifest.files), 'file')}"),
        ("metrics", _metrics(manifest) or "none"),
        ("values", ", ".join(sorted(manifest.values)) or "none"),
    ]

    # Limit the rows: a model may have thousands of tensors.
    rows = [
        (name, entry.dtype, str(list(entry.shape)), size_text(entry.bytes), str(len(entry.pieces)))
        for name, entry in sorted(manifest.tensors.items())
    ]

    lines = [columns(facts), "", columns([("tensor", "dtype", "shape", "size", "pieces"), *rows[:MAX_SHOWN]])]
    if len(rows) > MAX_SHOWN:
        lines.append(f"and {len(rows) - MAX_SHOWN} more")

    lines += [f"{name} is {target}" for name, target in sorted(manifest.aliases.items())]
    return "\n".join(lines), 0


def verify(path: Path) -> tuple[str, int]:
    """Read every byte of a checkpoint, or of all checkpoints of a run. The exit code is 1 if any is invalid."""
    # One row for each checkpoint, followed by one row for each of its files with a problem.
    rows = []
    exit_code = 0

    checkpoints = [Checkpoint.at(path)] if _names_a_checkpoint(path) else committed(_storage(path))
    for checkpoint in checkpoints:
        _, problems = verify_checkpoint(checkpoint)

        rows.append((checkpoint.name, problems[0].label if problems else "ok"))
        rows += [("", f"{problem.file}: {problem.why}") for problem in problems]
        exit_code |= bool(problems)

    return columns(rows) if rows else "no checkpoints", exit_code


def prune(path: Path, keep: int, dry_run: bool, set_aside: bool = False) -> tuple[str, int]:
    """Delete all but the newest `keep` valid checkpoints. Invalid ones do not count and are not deleted.

    With `set_aside`, also delete those that were set aside.
    """
    if keep < 1:
        raise UserError(f"--keep {keep} would keep no checkpoint", "", "use --keep 1 or more")

    # Read every byte, since only valid checkpoints count.
    storage = _storage(path)
    names = {checkpoint.step: checkpoint.name for checkpoint in committed(storage)}
    problems = {step: verify_checkpoint(Checkpoint(storage, name))[1] for step, name in names.items()}
    invalid = {step: found[0] for step, found in problems.items() if found}

    lines = []
    for step in sorted(invalid):
        lines.append(f"{names[step]} {invalid[step].verdict} and stays: lockstep ckpt verify {path}")

    # The newest of the valid ones stay.
    valid = [(step, {}) for step in names if step not in invalid]
    done = "would delete" if dry_run else "deleted"
    for step in steps_to_delete(valid, Retention(keep=keep)):
        if not dry_run:
            delete_checkpoint(storage, names[step], secrets.token_hex(8))

        lines.append(f"{done} {names[step]}")

    # No reader takes these for checkpoints, so they need no other name first.
    for name in sorted(filter(is_set_aside, storage.folders())) if set_aside else []:
        if not dry_run:
            storage.delete(name)

        lines.append(f"{done} {name}")

    return "\n".join(lines) or "nothing to delete", 0


def delete_objects(run: Path) -> None:
    """Delete all checkpoints of a run if they are in an object store: deleting the folder would leave the objects."""
    storage = open_storage(run / "checkpoints")
    if isinstance(storage, ObjectStorage):
        for name in storage.folders():
            storage.delete(name)


def export(path: Path, out: Path | None, step: int | None, best: bool = False, ema: bool = False) -> tuple[str, int]:
    """Write the weights of a checkpoint to a file; with `ema`, the averages of the weights."""
    checkpoint = choose_best(path) if best else choose(path, step)
    folder = out or run_folder_of(path) / "export" / checkpoint.name
    target = export_weights(checkpoint, folder, ema)

    digests = frozen_digests(checkpoint)
    if not digests:
        return str(target), 0

    missing = plural(len(digests), "frozen parameter")
    return f"{target}\nwithout {missing}, which no checkpoint holds: {', '.join(sorted(digests))}", 0


def frozen_digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the digests of the frozen parameters that the checkpoint does not hold (checkpoint.frozen=false)."""
    # A checkpoint that was not written by a run may hold any values.
    digests: Any = read_manifest(checkpoint).values
    for key in ("state", "model", "frozen_digests"):
        digests = digests.get(key) if isinstance(digests, dict) else None

    return digests or {}


def export_weights(checkpoint: Checkpoint, out: Path, ema: bool = False) -> Path:
    """Verify every byte, and write the tensors `model.*` to `out` or to `out`/model.safetensors.

    Tied weights are written once; the metadata maps their other names to that name. With `ema` the averages take the
    place of the parameters, and the file is called ema.safetensors.
    """
    from lockstep.observe.weights import write_weights  # needs torch

    tensors, aliases = read_weights(checkpoint, ema)
    if not tensors:
        raise UserError(
            f"the checkpoint {checkpoint.location} has no weights to export",
            f"no tensor whose name begins with {_PREFIX!r}",
            "list its tensors: lockstep ckpt show CKPT",
        )

    # An older file is replaced completely or not at all.
    name = "ema.safetensors" if ema else "model.safetensors"
    target = out if out.suffix == ".safetensors" else out / name
    target.parent.mkdir(parents=True, exist_ok=True)
    write_weights(target, tensors, aliases)
    return target


def read_weights(checkpoint: Checkpoint, ema: bool = False) -> tuple[dict[str, Any], dict[str, str]]:
    """Verify every byte, and return the tensors `model.*` without that prefix, and the other names of tied ones.

    With `ema` the averages of parameters take their places.
    """
    from lockstep.checkpoint.load import CheckpointReader  # needs torch

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
                f"the checkpoint {checkpoint.location} has no averages of the weights",
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
            f"the checkpoint {checkpoint.location} {problem.verdict} and cannot be exported",
            str(problem),
            "choose another checkpoint: lockstep ckpt ls RUN",
        ) from None

    return tensors, aliases


def choose(path: Path, step: int | None = None) -> Checkpoint:
    """Return the checkpoint at `path`. If `path` is a run, return its checkpoint of `step`, or its newest."""
    if _names_a_checkpoint(path) and step is None:
        return Checkpoint.at(path)

    checkpoints = {checkpoint.step: checkpoint for checkpoint in committed(_storage(path))}
    if not checkpoints:
        raise UserError(f"{path} has no committed checkpoint", "", "choose another run folder")

    chosen = max(checkpoints) if step is None else step
    if chosen not in checkpoints:
        steps = ", ".join(map(str, sorted(checkpoints)))
        raise UserError(f"{path} has no checkpoint of step {step}", f"it has steps {steps}", "use one of them")

    return checkpoints[chosen]


def has_checkpoints(path: Path) -> bool:
    """Return whether a run has committed checkpoints."""
    return (path / "checkpoints").is_dir() and bool(committed(_storage(path)))


def choose_best(path: Path) -> Checkpoint:
    """Return the best checkpoint of the run at `path`, by its setting `checkpoint.best`."""
    storage = _storage(path)
    try:
        best = best_checkpoint(storage, _retention_of(committed(storage)))
    except OSError as error:
        raise UserError(
            f"the checkpoints of {path} cannot be compared now",
            error.strerror or str(error),
            "try again, or choose one by its step: lockstep ckpt ls RUN",
        ) from None

    if best is None:
        raise UserError(
            f"{path} has no best checkpoint",
            "its newest checkpoint was saved without checkpoint.best, or none has an evaluation",
            "choose one by its step: lockstep ckpt ls RUN",
        )

    return best.checkpoint


def _retention_of(checkpoints: Sequence[Checkpoint]) -> Retention:
    """Return by which metric the newest valid checkpoint of a run was compared, as its settings say."""
    for checkpoint in checkpoints:
        with suppress(InvalidCheckpoint):
            # The settings are as they were written: another version may have written something else.
            settings = read_manifest(checkpoint).values.get("config")
            settings = settings if isinstance(settings, dict) else {}

            metric = settings.get("checkpoint.best", "null")
            mode = "max" if settings.get("checkpoint.best_mode") == "max" else "min"
            best = metric if isinstance(metric, str) and metric != "null" else None
            return Retention(best=best, best_mode=mode)

    return Retention()


def _storage(path: Path) -> CheckpointStorage:
    """Return the storage of a run's checkpoints. Raises a UserError."""
    # `path` is the run's folder, or the folder of its checkpoints, which may be written as ".".
    for root in (path / "checkpoints", path):
        if _absolute(root).name == "checkpoints" and root.is_dir():
            return open_storage(root)

    why = "has no folder checkpoints" if path.is_dir() else "does not exist"
    raise UserError(f"{path} {why}", "", "give the folder of a run, such as runs/char_lm-...")


def _names_a_checkpoint(path: Path) -> bool:
    """Whether `path` is a checkpoint and not a run. A damaged checkpoint may have no manifest."""
    # A checkpoint that was set aside is step-N.undone or step-N.damaged.
    absolute = _absolute(path)
    has_name = absolute.parent.name == "checkpoints" and step_in(absolute.name.partition(".")[0]) is not None
    return has_name or (path / MANIFEST).exists()


def run_folder_of(path: Path) -> Path:
    """Return the folder of the run to which `path` belongs: a run, the folder of its checkpoints, or a checkpoint."""
    if _names_a_checkpoint(path):
        return _absolute(path).parent.parent

    return path if (path / "checkpoints").is_dir() else _absolute(path).parent


def _absolute(path: Path) -> Path:
    # Links are not followed: the folder of the checkpoints may be a link to one with another name.
    return Path(os.path.abspath(path))


def _row(checkpoint: Checkpoint, best: BestCheckpoint | None) -> tuple[str, ...]:
    """Return the row of a checkpoint. Only sizes are checked here: digests would need to read everything."""
    step = str(checkpoint.step)

    try:
        manifest = read_manifest(checkpoint)
        for file in manifest.files:
            check_size(checkpoint, file)
    except InvalidCheckpoint as problem:
        return step, "", "", "", "", f"{problem.label}: {problem.file}: {problem.why}"

    is_best = best is not None and checkpoint == best.checkpoint
    return (
        step,
        _when(manifest),
        size_text(manifest.bytes),
        str(len(manifest.tensors)),
        _metrics(manifest),
        f"not verified, best {best.metric}" if best and is_best else "not verified",
    )


def _when(manifest: Manifest) -> str:
    """Return when a checkpoint was written, in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))


def _metrics(manifest: Manifest) -> str:
    return " ".join(f"{key}={value:.4g}" for key, value in manifest.metrics.items() if isinstance(value, int | float))
