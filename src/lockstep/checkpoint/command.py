"""The command `lockstep ckpt`: the function of each action returns the text to print and the exit code.

Only `export` imports torch, when it is called, so that all other actions start fast.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rich.filesize import decimal as size_text

from lockstep.checkpoint.choose import checkpoints_at, retention_of, run_folder_of, storage_of
from lockstep.checkpoint.export import export_weights
from lockstep.checkpoint.integrity import check_size, verify_checkpoint
from lockstep.checkpoint.manifest import InvalidCheckpoint, Manifest
from lockstep.checkpoint.manifest_reader import read_manifest
from lockstep.checkpoint.metrics import CheckpointMetrics, metrics_of
from lockstep.checkpoint.retention import BestCheckpoint, best_checkpoint, steps_to_delete
from lockstep.checkpoint.storage.folder import Checkpoint, CheckpointStorage, list_checkpoints
from lockstep.checkpoint.storage.transitions import delete_checkpoint
from lockstep.errors import UserError, plural, shell_word
from lockstep.observe.formats import columns
from lockstep.run_folder.checkpoint_names import folder_name, is_half_deleted, is_set_aside
from lockstep.run_folder.names import EXPORT

# How many tensors `show` lists, and how many checkpoints `ls` lists.
MAX_SHOWN = 200
MAX_LISTED = 1000


def ls(path: Path) -> tuple[str, int]:
    """List the checkpoints of a run. This reads only manifests and the sizes of files; `verify` reads all bytes."""
    storage = storage_of(path)
    checkpoints = list_checkpoints(storage)

    # If metrics cannot be read now, no checkpoint is called the best; its own row says why.
    best = None
    with suppress(OSError):
        best = best_checkpoint(CheckpointMetrics(storage), retention_of(checkpoints))

    rows = [_row(checkpoint, best) for checkpoint in checkpoints[:MAX_LISTED]]
    if not rows:
        return "no checkpoints", 0

    rest = f"\nand {len(checkpoints) - MAX_LISTED} older ones" if len(checkpoints) > MAX_LISTED else ""
    return columns([("step", "when", "size", "tensors", "metrics", "state"), *rows]) + rest, 0


def show(checkpoint: Checkpoint) -> tuple[str, int]:
    """Describe a checkpoint in detail."""
    try:
        manifest = read_manifest(checkpoint)
        metrics = metrics_of(checkpoint, manifest)
    except InvalidCheckpoint as problem:
        return f"{problem.label}: {problem}", 1

    facts = [
        ("checkpoint", str(checkpoint.path)),
        ("step", str(manifest.step)),
        ("when", _when(manifest)),
        ("lockstep", manifest.lockstep),
        ("size", f"{size_text(manifest.bytes)} in {plural(len(manifest.files), 'file')}"),
        ("metrics", _as_text(metrics) or "none"),
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

    storage, name = checkpoints_at(path)
    checkpoints = [Checkpoint(storage, name)] if name else list_checkpoints(storage_of(path))
    for checkpoint in checkpoints:
        _, problems = _verify_with_metrics(checkpoint)
        # A run may have deleted it since it was listed: that is no damage.
        if problems and name is None and not checkpoint.exists():
            continue

        rows.append((checkpoint.name, problems[0].label if problems else "ok"))
        rows += [("", f"{problem.file}: {problem.why}") for problem in problems]
        exit_code |= bool(problems)

    return columns(rows) if rows else "no checkpoints", exit_code


def _verify_with_metrics(checkpoint: Checkpoint) -> tuple[dict[str, float], Sequence[InvalidCheckpoint]]:
    """Read every byte of a checkpoint. Return its metrics and its problems; a problem with the metrics is one, too."""
    manifest, problems = verify_checkpoint(checkpoint)
    if manifest is None or problems:
        return {}, problems

    try:
        return metrics_of(checkpoint, manifest), []
    except InvalidCheckpoint as problem:
        return {}, [problem]


def prune(path: Path, keep: int, dry_run: bool, set_aside: bool = False) -> tuple[str, int]:
    """Delete all but the newest `keep` valid checkpoints, and what the run keeps by its other settings.

    Invalid checkpoints do not count and are not deleted. With `set_aside`, also delete what was set aside. The exit
    code is 1 if something could not be deleted; the next call tries again.
    """
    if keep < 1:
        raise UserError(f"--keep {keep} would keep no checkpoint", "", "use --keep 1 or more")

    # Read every byte, since only valid checkpoints count.
    storage = storage_of(path)
    checkpoints = list_checkpoints(storage)
    metrics = {}
    lines = []
    for checkpoint in reversed(checkpoints):
        found, problems = _verify_with_metrics(checkpoint)
        if problems and not checkpoint.exists():
            continue

        if problems:
            verify_it = f"lockstep ckpt verify {shell_word(path)}"
            lines.append(f"{checkpoint.name} {problems[0].predicate} and stays: {verify_it}")
        else:
            metrics[checkpoint.step] = found

    # The settings of the run, with another number of the newest.
    config = retention_of(checkpoints).model_copy(update={"keep": keep})
    names = [folder_name(step) for step in steps_to_delete(metrics, config)]
    if set_aside:
        names += sorted(filter(is_set_aside, storage.folders()))

    # An earlier call, or a run, could not delete these as a whole.
    names += sorted(filter(is_half_deleted, storage.folders()))

    failed = 0
    for name in names:
        try:
            if not dry_run:
                delete_checkpoint(storage, name, secrets.token_hex(8))
        except OSError as error:
            # A store may be out of reach. The other checkpoints are deleted all the same.
            failed = 1
            lines.append(f"{name} could not be deleted: {error}")
        else:
            lines.append(f"{'would delete' if dry_run else 'deleted'} {name}")

    return "\n".join(lines) or "nothing to delete", failed


def export(
    path: Path, checkpoint: Checkpoint, out: Path | None, ema: bool = False, overwrite: bool = False
) -> tuple[str, int]:
    """Write the weights of a checkpoint, found at `path`, to a file; with `ema`, the averages of the weights."""
    folder = out or run_folder_of(path) / EXPORT / checkpoint.name
    target, left_out = export_weights(checkpoint, folder, ema, overwrite)
    if not left_out:
        return str(target), 0

    parameters = plural(len(left_out), "frozen parameter")
    return f"{target}\nwithout {parameters}, which no checkpoint holds: {', '.join(left_out)}", 0


def delete_objects(run_dir: Path) -> None:
    """Delete what the checkpoints of a run have in a store."""
    CheckpointStorage.of_run(run_dir).delete_objects()


def _row(checkpoint: Checkpoint, best: BestCheckpoint | None) -> tuple[str, ...]:
    """Return the row of a checkpoint. Only sizes are checked here: digests would need to read everything."""
    step = str(checkpoint.step)

    try:
        manifest = read_manifest(checkpoint)
        metrics = metrics_of(checkpoint, manifest)
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
        _as_text(metrics),
        f"not verified, best {best.metric}" if best and is_best else "not verified",
    )


def _when(manifest: Manifest) -> str:
    """Return when a checkpoint was written, in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))


def _as_text(metrics: Mapping[str, float]) -> str:
    return " ".join(f"{key}={value:.4g}" for key, value in metrics.items() if isinstance(value, int | float))
