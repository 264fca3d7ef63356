"""The readers' weights: trained once on text, kept with their digest, and never changed again."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lockstep.errors import UserError
from lockstep.recipes.latent_wire.reader import Reader, ReaderShape
from lockstep.recipes.latent_wire.school import School, Schooling
from lockstep.recipes.latent_wire.tokens import TOKENIZERS
from lockstep.recipes.latent_wire.world import World

VERSION = 3  # of how they are trained


def frozen_reader(
    folder: Path, shape: ReaderShape, world: World, schooling: Schooling, home: str | None = None
) -> Reader:
    """From `folder`; trained first if it is not there. Of several processes one trains, the others wait."""
    settings = {
        "version": VERSION,
        "shape": asdict(shape),
        "world": {"kind": type(world).__name__, **asdict(world)},  # pyrefly: ignore[bad-argument-type]
        "enough": schooling.enough,
        "batch": schooling.batch,
        "rate": schooling.rate,
        "easier_first": schooling.easier_first,
        "torch": torch.__version__,
    }
    name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    weights, about = folder / f"{name}.safetensors", folder / f"{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(), _alone(folder / f"{name}.lock"):
        torch.manual_seed(world.seed)
        if not about.exists():
            pupil = _new(shape, world)
            facts = School(pupil, world, schooling, folder / f"{name}.school").run()
            save_file({key: tensor.cpu().contiguous() for key, tensor in pupil.state_dict().items()}, weights)
            staged = about.with_suffix(".tmp")
            staged.write_text(json.dumps({"sha256": _digest(weights), **settings, **facts}, indent=2))
            os.replace(staged, about)
    _check(weights, about)
    reader = _new(shape, world)
    reader.load_state_dict(load_file(weights))
    return reader.settle(home)


def _new(shape: ReaderShape, world: World) -> Reader:
    return Reader(TOKENIZERS[shape.tokens](world.words).size, shape)


def _check(weights: Path, about: Path) -> None:
    expected = json.loads(about.read_text())["sha256"]
    if not weights.exists() or _digest(weights) != expected:
        raise UserError(
            f"the frozen reader {weights}",
            "its bytes are not those that were trained (sha256)" if weights.exists() else "the file is gone",
            f"remove {about} to train it again; a wire that was trained with the old one does not fit the new one",
        )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
