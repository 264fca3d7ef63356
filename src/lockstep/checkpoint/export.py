"""The weights of a checkpoint as one ordinary file that any tool can read. Needs no GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from lockstep.checkpoint import format
from lockstep.checkpoint.load import CheckpointReader
from lockstep.checkpoint.manifest import Damaged, Manifest, read_manifest
from lockstep.errors import UserError

PREFIX = "model."


def export(path: Path, out: Path) -> Path:
    """Write the tensors `model.*` to `out` (or to `out`/model.safetensors). Every byte is verified first.

    Tied weights are written once; the metadata say under which name the others are to be found.
    """
    try:
        manifest = read_manifest(path)
        if problems := format.problems(path, manifest, manifest.files):
            raise problems[0]
        reader = CheckpointReader(path, manifest)
        names = [name for name in reader.names() if name.startswith(PREFIX)]
        tied = {name: reader.original(name) for name in names if reader.original(name) != name}
        tied = {name: original for name, original in tied.items() if original.startswith(PREFIX)}
        tensors = {name.removeprefix(PREFIX): reader.read(name) for name in names if name not in tied}
    except Damaged as damaged:
        raise UserError(f"export {path}", str(damaged), "choose another checkpoint: lockstep ckpt ls RUN") from None
    if not tensors:
        found = f"no tensor whose name begins with {PREFIX!r}"
        raise UserError(f"export the weights of {path}", found, "look at what is there: lockstep ckpt show CKPT")
    metadata = {name.removeprefix(PREFIX): original.removeprefix(PREFIX) for name, original in tied.items()}
    target = out if out.suffix == ".safetensors" else out / "model.safetensors"
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        save_file(tensors, draft, metadata={**metadata, "format": "pt"})
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    return target


def left_out(manifest: Manifest) -> list[str]:
    """The frozen parameters that the run keeps out of its checkpoints, and so out of the export."""
    found: Any = manifest.values
    for key in ("state", "model", "left_out"):
        found = found.get(key) if isinstance(found, dict) else None
    return sorted(found or ())
