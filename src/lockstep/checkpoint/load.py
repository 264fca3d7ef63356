"""The newest checkpoint that is valid, agreed on by all ranks before any of them changes a weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from lockstep.checkpoint import format
from lockstep.checkpoint.dtypes import TYPES
from lockstep.checkpoint.manifest import SIZES, Damaged, Manifest, Piece, TensorEntry, read_manifest
from lockstep.checkpoint.storage import Store
from lockstep.errors import UserError

StepBatches = Callable[[Any], list[Any]]  # an all-gather of JSON values, called by all ranks in the same order


@dataclass
class Found:
    path: Path
    manifest: Manifest
    passed_over: list[Damaged] = field(default_factory=list)  # newer ones, one entry each


def find(store: Store, rank: int, size: int, share: StepBatches, only: Path | None = None) -> Found | None:
    """The newest checkpoint whose every byte is right, or exactly `only`. None if there is none at all.

    Each rank reads its share of the files; the answer is the same on all ranks.
    """
    asked = [str(only)] if only else [path.name for path in store.committed()]
    names = share(asked)[0]  # rank 0 decides; this also waits until it has claimed the store
    _check_shared(share([_visible(store, names, only), asked != [], store.owner()]), bool(names))
    damaged: list[Damaged] = []
    for name in names:
        path = only or store.root / name
        manifest, problems = _verify(path, rank, size)
        read = xxhash.xxh3_128(repr(manifest).encode()).hexdigest()
        answers = share([[[problem.file, problem.why] for problem in problems], read])
        bad = sorted({(file, why) for problems, _ in answers for file, why in problems})
        if not bad and len({read for _, read in answers}) > 1:
            raise _not_shared("the ranks read different manifests there")
        if not bad:
            assert manifest is not None
            return Found(path, manifest, damaged)
        (file, why), *others = bad
        damaged.append(Damaged(path, file, "; ".join([why, *(f"{file}: {why}" for file, why in others)])))
    if damaged:
        raise _nothing_left(damaged, only)
    return None


def _verify(path: Path, rank: int, size: int) -> tuple[Manifest | None, list[Damaged]]:
    """The manifest, and what is wrong with it or with this rank's share of the files."""
    try:
        manifest = read_manifest(path)
    except Damaged as damaged:
        return None, [damaged]
    return manifest, format.problems(path, manifest, manifest.files[rank::size])


def _visible(store: Store, names: Sequence[str], only: Path | None) -> list[str]:
    return [name for name in names if (only or store.root / name).exists()]


def _check_shared(answers: list[Any], any_listed: bool) -> None:
    """Every rank must see what rank 0 sees; each on a disk of its own would train, and save, alone."""
    visible, _, owner = answers[0]
    for rank, (also, has_any, other_owner) in enumerate(answers):
        if also != visible or other_owner != owner or (has_any and not any_listed):
            raise _not_shared(f"rank {rank} does not see there what rank 0 sees")


def _not_shared(found: str) -> UserError:
    return UserError(
        "resume from the checkpoints in run_dir",
        found,
        "set run_dir to a folder on a file system that all machines share",
    )


def _nothing_left(damaged: list[Damaged], only: Path | None) -> UserError:
    if only:
        asked, fix = f"resume from {only}", "choose another checkpoint: lockstep ckpt ls RUN"
    else:
        asked, fix = f"resume from {damaged[0].path.parent}", "start again in a new run_dir, or restore these files"
    return UserError(asked, "no checkpoint is whole: " + "; ".join(map(str, damaged)), fix)


class CheckpointReader:
    """The tensors of a checkpoint, on the CPU: whole ones, or any block, however they were cut when saved."""

    def __init__(self, path: Path, manifest: Manifest):
        self.path, self.manifest = path, manifest
        self._headers: dict[str, dict[str, format.Stored]] = {}

    def names(self) -> list[str]:
        return sorted([*self.manifest.tensors, *self.manifest.aliases])

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def original(self, name: str) -> str:
        """The name under which the bytes are stored: of tied weights, the first one's."""
        return self.manifest.aliases.get(name, name)

    def read(self, name: str) -> torch.Tensor:
        shape = self.shape(name)
        return self.read_block(name, (0,) * len(shape), shape)

    def read_block(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """The block of `shape` that lies at `offset` in the whole. Damaged if a file is not what it was."""
        entry = self._entry(name)
        ends = [start + length for start, length in zip(offset, shape, strict=True)]
        inside = zip(offset, ends, entry.shape, strict=True)
        if not all(0 <= start <= end <= limit for start, end, limit in inside):
            raise ValueError(f"{name} has the shape {entry.shape}; no block {tuple(shape)} lies at {tuple(offset)}")
        dtype = TYPES[entry.dtype]
        for piece in entry.pieces:
            if (piece.offset, piece.shape) == (tuple(offset), tuple(shape)):
                return self._rows(piece, entry.dtype, 0, shape[0] if shape else 1).view(dtype).view(tuple(shape))
        for piece in entry.pieces:
            self._stored(piece, entry.dtype)  # a hostile manifest must not make us allocate what no file holds
        whole = torch.empty(tuple(shape), dtype=dtype)
        for piece in entry.pieces:
            low = [max(a, b) for a, b in zip(offset, piece.offset, strict=True)]
            high = [min(a, b + n) for a, b, n in zip(ends, piece.offset, piece.shape, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                target = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))
                whole[target] = self._part(piece, entry.dtype, low, high)
        return whole

    def _part(self, piece: Piece, dtype: str, low: list[int], high: list[int]) -> torch.Tensor:
        """The elements of `piece` between two corners, given in the coordinates of the whole tensor."""
        first, last = low[0] - piece.offset[0], high[0] - piece.offset[0]
        rows = self._rows(piece, dtype, first, last).view(TYPES[dtype]).view(last - first, *piece.shape[1:])
        inner = zip(low[1:], high[1:], piece.offset[1:], strict=True)
        return rows[(slice(None), *(slice(a - o, b - o) for a, b, o in inner))]

    def _rows(self, piece: Piece, dtype: str, first: int, last: int) -> torch.Tensor:
        """The bytes of some rows of a piece: they lie together in the file, and no others are read."""
        stored = self._stored(piece, dtype)
        row = math.prod(piece.shape[1:]) * SIZES[dtype]
        data = torch.empty((last - first) * row, dtype=torch.uint8)
        try:
            with open(self.path / piece.file, "rb", buffering=0) as file:
                file.seek(stored.start + first * row)
                view = data.numpy().data
                while view and (count := file.readinto(view)):
                    view = view[count:]
        except OSError as error:
            raise Damaged(self.path, piece.file, f"cannot be read: {error.strerror or error}") from None
        if view:
            raise Damaged(self.path, piece.file, "ends too early")
        return data

    def _stored(self, piece: Piece, dtype: str) -> format.Stored:
        if piece.file not in self._headers:
            self._headers[piece.file] = format.read_header(self.path, piece.file)
        return format.check_piece(self.path, piece.file, piece.key, self._headers[piece.file], dtype, piece.shape)

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self.manifest.tensors[self.original(name)]
        except KeyError:
            raise KeyError(f"the checkpoint {self.path.name} has no tensor {name!r}") from None
