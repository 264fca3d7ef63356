"""What the command `lockstep ckpt` says about the checkpoints of a run. Looking at them needs no torch."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from lockstep.checkpoint import format
from lockstep.checkpoint.durable import spoken
from lockstep.checkpoint.manifest import NAME, Damaged, Manifest, check_size, read_manifest
from lockstep.checkpoint.retention import Retention, to_delete
from lockstep.checkpoint.storage import Store, step_number
from lockstep.errors import UserError

_MANY = 200  # tensors that `show` lists


def ls(place: Path) -> tuple[str, int]:
    """A line for each checkpoint, from its manifest and the sizes of its files. `verify` knows about the bytes."""
    head = ("step", "when", "size", "tensors", "metrics", "state")
    rows = [_row(path) for path in _store(place).committed()]
    return _table([head, *rows]) if rows else "no checkpoints", 0


def show(place: Path) -> tuple[str, int]:
    """The newest checkpoint, or this one, in detail."""
    path = choose(place)
    try:
        manifest = read_manifest(path)
    except Damaged as damaged:
        return f"damaged: {damaged}", 1
    facts = [
        ("checkpoint", str(path)),
        ("step", str(manifest.step)),
        ("when", _when(manifest)),
        ("lockstep", manifest.lockstep),
        ("size", f"{spoken(manifest.bytes)} in {len(manifest.files)} files"),
        ("metrics", _metrics(manifest) or "none"),
        ("values", ", ".join(sorted(manifest.values)) or "none"),
    ]
    rows = [("tensor", "dtype", "shape", "size", "pieces")]
    for name, entry in sorted(manifest.tensors.items()):
        rows.append((name, entry.dtype, str(list(entry.shape)), spoken(entry.bytes), str(len(entry.pieces))))
    lines = [_table(facts), "", _table(rows[: _MANY + 1])]
    if len(rows) > _MANY + 1:
        lines.append(f"and {len(rows) - 1 - _MANY} more")
    lines += [f"{name} is {target}" for name, target in sorted(manifest.aliases.items())]
    return "\n".join(lines), 0


def verify(place: Path) -> tuple[str, int]:
    """Read every byte of one checkpoint, or of all of a run; code 1 if any is not what was written."""
    rows, bad = [], False
    for path in [place] if _is_checkpoint(place) else _store(place).committed():
        problems = _problems(path)
        bad = bad or bool(problems)
        rows.append((path.name, "damaged" if problems else "ok"))
        rows += [("", f"{problem.file}: {problem.why}") for problem in problems]
    return _table(rows) if rows else "no checkpoints", int(bad)


def prune(place: Path, keep: int, dry_run: bool) -> tuple[str, int]:
    """Delete all but the newest `keep`, counting only those that are whole: a damaged one must not push out a good."""
    store = _store(place)
    paths = {step_number(path): path for path in store.committed()}
    damaged = {step for step, path in paths.items() if _problems(path)}
    doomed = to_delete([(step, {}) for step in paths if step not in damaged], Retention(last=keep))
    lines = [f"{paths[step].name} is damaged and stays: lockstep ckpt verify {place}" for step in sorted(damaged)]
    for step in doomed:
        if not dry_run:
            store.remove(paths[step], secrets.token_hex(8))
        lines.append(f"{'would delete' if dry_run else 'deleted'} {paths[step].name}")
    return "\n".join(lines) or "nothing to delete", 0


def export(place: Path, out: Path | None, step: int | None) -> tuple[str, int]:
    """Write the weights to one file."""
    from lockstep.checkpoint.export import export, left_out  # needs torch

    path = choose(place, step)
    target = export(path, out or path.parent.parent / "export" / path.name)
    missing = left_out(read_manifest(path))
    note = [f"{len(missing)} frozen parameters are in no checkpoint, and so not in it: {', '.join(missing)}"]
    return "\n".join([str(target), *(note if missing else [])]), 0


def choose(place: Path, step: int | None = None) -> Path:
    """The checkpoint `place` itself, or the newest of the run there, or the one of `step`."""
    if _is_checkpoint(place) and step is None:
        return place
    found = _store(place).committed()
    if not found:
        raise UserError(f"a checkpoint in {place}", "none was committed", "choose another run folder")
    if step is None:
        return found[0]
    by_step = {step_number(path): path for path in found}
    if step not in by_step:
        steps = ", ".join(str(known) for known in sorted(by_step))
        raise UserError(f"the checkpoint of step {step} in {place}", f"those of steps {steps}", "use one of them")
    return by_step[step]


def _store(place: Path) -> Store:
    for root in (place / "checkpoints", place):
        if root.name == "checkpoints" and root.is_dir():
            return Store(root)
    found = "no folder checkpoints in it" if place.is_dir() else "no such folder"
    raise UserError(f"the checkpoints of {place}", found, "give the folder of a run, such as runs/char_lm-...")


def _is_checkpoint(place: Path) -> bool:
    return (place / NAME).exists() or place.parent.name == "checkpoints"


def _problems(path: Path) -> Sequence[Damaged]:
    try:
        manifest = read_manifest(path)
    except Damaged as damaged:
        return [damaged]
    return format.problems(path, manifest, manifest.files)


def _row(path: Path) -> tuple[str, ...]:
    step = str(step_number(path))
    try:
        manifest = read_manifest(path)
        for file in manifest.files:
            check_size(path, file)
    except Damaged as damaged:
        return step, "", "", "", "", f"damaged: {damaged.file}: {damaged.why}"
    size, count = spoken(manifest.bytes), str(len(manifest.tensors))
    return step, _when(manifest), size, count, _metrics(manifest), "not verified"


def _when(manifest: Manifest) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))


def _metrics(manifest: Manifest) -> str:
    found = {name: value for name, value in manifest.metrics.items() if isinstance(value, int | float)}
    return " ".join(f"{name}={value:.4g}" for name, value in found.items())


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
