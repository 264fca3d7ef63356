"""Find the newest valid checkpoint, agreed on by all ranks before any of them changes a weight, and read its tensors.

Nothing is trusted: every byte is compared with its digest before a tensor is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from lockstep.checkpoint.format import Stored, find_problems, locate, read_header
from lockstep.checkpoint.manifest import SIZES, Damaged, Manifest, Piece, TensorEntry, read_manifest
from lockstep.checkpoint.state_tree import DTYPES
from lockstep.checkpoint.storage import Checkpoint, Store, committed
from lockstep.errors import UserError

# An all-gather of JSON values. All ranks call it in the same order.
Gather = Callable[[Any], list[Any]]


@dataclass
class Found:
    """A checkpoint whose every byte is right."""

    checkpoint: Checkpoint
    manifest: Manifest

    # Newer checkpoints that are not valid, an entry each.
    damaged: list[Damaged] = field(default_factory=list)

    def reader(self) -> CheckpointReader:
        return CheckpointReader(self.checkpoint, self.manifest)


def find(store: Store, rank: int, size: int, gather: Gather, only: str | None = None) -> Found | None:
    """Return the newest checkpoint whose every byte is right, or exactly `only`. Return None if the store has none.

    Collective: each rank reads its share of the files, and the answer is the same on all ranks.
    """
    # Rank 0 decides what to look at. This also waits until rank 0 has claimed the store.
    listed = [only] if only else [checkpoint.name for checkpoint in committed(store)]
    names = gather(listed)[0]

    # Every rank must see what rank 0 has listed, or they do not share a disk.
    visible = sorted(set(names) & set(store.folders()))
    _check_shared(gather([visible, listed != [], store.owner()]), bool(names))

    damaged: list[Damaged] = []
    for name in names:
        checkpoint = Checkpoint(store, name)
        manifest, problems = _verify(checkpoint, rank, size)

        # A problem of one rank is a problem of all. The digest tells whether all ranks have read the same manifest.
        digest = xxhash.xxh3_128(repr(manifest).encode()).hexdigest()
        answers = gather([[[problem.file, problem.why] for problem in problems], digest])
        bad = sorted({(file, why) for problems, _ in answers for file, why in problems})
        if bad:
            damaged.append(_merge(checkpoint, bad))
            continue

        if len({digest for _, digest in answers}) > 1:
            raise _not_shared("the ranks read different manifests there")
        assert manifest is not None
        return Found(checkpoint, manifest, damaged)

    if damaged:
        raise _nothing_valid(store, damaged, only)
    return None


def _verify(checkpoint: Checkpoint, rank: int, size: int) -> tuple[Manifest | None, list[Damaged]]:
    """Return the manifest, and what is wrong with it or with this rank's share of the files."""
    try:
        manifest = read_manifest(checkpoint)
    except Damaged as damaged:
        return None, [damaged]
    return manifest, find_problems(checkpoint, manifest, manifest.files[rank::size])


def _merge(checkpoint: Checkpoint, bad: list[tuple[str, str]]) -> Damaged:
    """Return one entry for all bad files of a checkpoint: (file, why) each."""
    (first, why), *others = bad
    reasons = [why, *(f"{file}: {why}" for file, why in others)]
    return Damaged(checkpoint, first, "; ".join(reasons))


def _check_shared(answers: list[Any], any_listed: bool) -> None:
    """Check that every rank sees what rank 0 sees; each on a disk of its own would train, and save, alone."""
    # A rank that has checkpoints where rank 0 has none is on another disk, too.
    visible, _, owner = answers[0]
    for rank, (also_visible, has_any, other_owner) in enumerate(answers):
        if also_visible != visible or other_owner != owner or (has_any and not any_listed):
            raise _not_shared(f"rank {rank} does not see there what rank 0 sees")


def _not_shared(found: str) -> UserError:
    return UserError(
        "run_dir is not on a file system that all ranks share",
        found,
        "set run_dir to a folder on a file system that all machines share",
    )


def _nothing_valid(store: Store, damaged: list[Damaged], only: str | None) -> UserError:
    found = "; ".join(map(str, damaged))
    if only:
        problem = f"the checkpoint {Checkpoint(store, only).path} is damaged"
        return UserError(problem, found, "choose another checkpoint: lockstep ckpt ls RUN")
    problem = f"every checkpoint in {store.address} is damaged"
    return UserError(problem, found, "start again in a new run_dir, or restore these files")


class CheckpointReader:
    """The tensors of a checkpoint, on the CPU: full ones, or any block, however they were sharded when saved.

    Only the bytes that are needed are read. Digests are not checked again: `find` has done that.
    """

    def __init__(self, checkpoint: Checkpoint, manifest: Manifest):
        self.checkpoint = checkpoint
        self.manifest = manifest

        # By file. They are read when they are needed.
        self._headers: dict[str, dict[str, Stored]] = {}

    def names(self) -> list[str]:
        return sorted([*self.manifest.tensors, *self.manifest.aliases])

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def original(self, name: str) -> str:
        """Return the name under which the bytes are stored: of tied weights, the first one's."""
        return self.manifest.aliases.get(name, name)

    def read(self, name: str) -> torch.Tensor:
        """Read a full tensor."""
        shape = self.shape(name)
        return self.read_block(name, (0,) * len(shape), shape)

    def read_block(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Read the block of `shape` that lies at `offset` in the full tensor. Raise Damaged if a file has changed."""
        entry = self._entry(name)
        ends = [start + length for start, length in zip(offset, shape, strict=True)]
        bounds = zip(offset, ends, entry.shape, strict=True)
        if not all(0 <= start <= end <= limit for start, end, limit in bounds):
            raise ValueError(f"{name} has the shape {entry.shape}; no block {tuple(shape)} lies at {tuple(offset)}")

        dtype = DTYPES[entry.dtype]

        # The usual case: this is exactly what some rank has written, and needs no second copy.
        for piece in entry.pieces:
            if (piece.offset, piece.shape) == (tuple(offset), tuple(shape)):
                return self._rows(piece, entry.dtype, 0, shape[0] if shape else 1).view(dtype).view(tuple(shape))

        # Look at all files before allocating: a hostile manifest must not make us allocate what no file holds.
        for piece in entry.pieces:
            self._locate(piece, entry.dtype)

        # Put the block together from the pieces that it overlaps. `low` and `high` are the corners of an overlap.
        block = torch.empty(tuple(shape), dtype=dtype)
        for piece in entry.pieces:
            low = [max(a, b) for a, b in zip(offset, piece.offset, strict=True)]
            high = [min(a, b + n) for a, b, n in zip(ends, piece.offset, piece.shape, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                target = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))
                block[target] = self._part(piece, entry.dtype, low, high)
        return block

    def _part(self, piece: Piece, dtype: str, low: list[int], high: list[int]) -> torch.Tensor:
        """Read the elements of `piece` between two corners, given in the coordinates of the full tensor."""
        # Along the first dimension, no other row is read; along the others, more than needed may be.
        first = low[0] - piece.offset[0]
        last = high[0] - piece.offset[0]
        rows = self._rows(piece, dtype, first, last).view(DTYPES[dtype]).view(last - first, *piece.shape[1:])
        inner = zip(low[1:], high[1:], piece.offset[1:], strict=True)
        return rows[(slice(None), *(slice(a - o, b - o) for a, b, o in inner))]

    def _rows(self, piece: Piece, dtype: str, first: int, last: int) -> torch.Tensor:
        """Read the bytes of some rows of a piece, shape (bytes,): they lie together in the file."""
        # The file is read into the tensor's own memory.
        stored = self._locate(piece, dtype)
        row = math.prod(piece.shape[1:]) * SIZES[dtype]
        data = torch.empty((last - first) * row, dtype=torch.uint8)
        rest = data.numpy().data
        try:
            with self.checkpoint.open(piece.file) as file:
                file.seek(stored.start + first * row)
                while rest and (count := file.readinto(rest)):
                    rest = rest[count:]
        except OSError as error:
            raise Damaged(self.checkpoint, piece.file, f"cannot be read: {error.strerror or error}") from None
        if rest:
            raise Damaged(self.checkpoint, piece.file, "ends too early")
        return data

    def _locate(self, piece: Piece, dtype: str) -> Stored:
        if piece.file not in self._headers:
            self._headers[piece.file] = read_header(self.checkpoint, piece.file)
        return locate(self.checkpoint, piece.file, piece.key, self._headers[piece.file], dtype, piece.shape)

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self.manifest.tensors[self.original(name)]
        except KeyError:
            raise KeyError(f"the checkpoint {self.checkpoint.name} has no tensor {name!r}") from None
