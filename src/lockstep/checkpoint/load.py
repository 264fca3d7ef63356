"""Find the newest valid checkpoint, agreed on by all ranks before any of them changes a weight, and read its tensors.

Nothing is trusted: every byte is compared with its digest before a tensor is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import xxhash

from lockstep.checkpoint.format import Stored, locate, read_header, verify
from lockstep.checkpoint.manifest import SIZES, Damaged, Manifest, Piece, TensorEntry, open_file
from lockstep.checkpoint.state_tree import DTYPES
from lockstep.checkpoint.storage import Checkpoint, Store, committed
from lockstep.errors import UserError

# An all-gather of JSON values. All ranks call it in the same order.
Gather = Callable[[Any], list[Any]]


def find(store: Store, rank: int, size: int, gather: Gather, only: str | None = None) -> CheckpointReader | None:
    """Return a reader of the newest checkpoint whose every byte is right, or of exactly `only`; None if there is none.

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
        manifest, problems = verify(checkpoint, rank, size)

        # A problem of one rank is a problem of all. The digest tells whether all ranks have read the same manifest.
        digest = xxhash.xxh3_128(repr(manifest).encode()).hexdigest()
        answers = gather([[[problem.file, problem.why] for problem in problems], digest])
        bad = sorted({(file, why) for problems, _ in answers for file, why in problems})
        if bad:
            # One entry names the first file, and the others in its reason.
            first = bad[0][0]
            reasons = "; ".join(f"{file}: {why}" for file, why in bad)
            damaged.append(Damaged(checkpoint, first, reasons.removeprefix(f"{first}: ")))
            continue

        if len({digest for _, digest in answers}) > 1:
            raise _not_shared("the ranks read different manifests there")
        assert manifest is not None
        return CheckpointReader(checkpoint, manifest, damaged)

    if not damaged:
        return None

    found = "; ".join(map(str, damaged))
    if only:
        problem = f"the checkpoint {damaged[0].checkpoint.path} is damaged"
        raise UserError(problem, found, "choose another checkpoint: lockstep ckpt ls RUN")
    problem = f"every checkpoint in {store.address} is damaged"
    raise UserError(problem, found, "start again in a new run_dir, or restore these files")


def _check_shared(answers: list[Any], any_listed: bool) -> None:
    """Check that every rank sees what rank 0 sees; ranks with disks of their own would train, and save, alone."""
    # A rank that has checkpoints where rank 0 has none is on another disk.
    visible, _, owner = answers[0]
    for rank, (rank_visible, has_any, rank_owner) in enumerate(answers):
        if rank_visible != visible or rank_owner != owner or (has_any and not any_listed):
            raise _not_shared(f"rank {rank} does not see there what rank 0 sees")


def _not_shared(found: str) -> UserError:
    return UserError(
        "run_dir is not on a file system that all ranks share",
        found,
        "set run_dir to a folder on a file system that all machines share",
    )


class CheckpointReader:
    """The tensors of a checkpoint, on the CPU: full ones, or any slice, however they were sharded when saved.

    Only the bytes that are needed are read. Digests are not checked again: `find` has done that.
    """

    def __init__(self, checkpoint: Checkpoint, manifest: Manifest, damaged: Sequence[Damaged] = ()):
        """`damaged`: one entry for each newer checkpoint that `find` has skipped."""
        self.checkpoint = checkpoint
        self.manifest = manifest
        self.damaged = list(damaged)

        # The headers that have been read so far, by file.
        self._headers: dict[str, dict[str, Stored]] = {}

    def names(self) -> list[str]:
        return sorted([*self.manifest.tensors, *self.manifest.aliases])

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def original(self, name: str) -> str:
        """Return the name under which the bytes are stored; tied weights are stored under the first of their names."""
        return self.manifest.aliases.get(name, name)

    def read(self, name: str) -> torch.Tensor:
        """Read a full tensor."""
        shape = self.shape(name)
        return self.read_slice(name, (0,) * len(shape), shape)

    def read_slice(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Read the slice of `shape` that begins at `offset` in the full tensor. Raise Damaged if a file has changed."""
        entry = self._entry(name)

        ends = [start + length for start, length in zip(offset, shape, strict=True)]
        bounds = zip(offset, ends, entry.shape, strict=True)
        if not all(0 <= start <= end <= limit for start, end, limit in bounds):
            raise ValueError(f"{name} has the shape {entry.shape}; no slice {tuple(shape)} begins at {tuple(offset)}")

        # The usual case: this is exactly what some rank has written, and needs no second copy.
        for piece in entry.pieces:
            if (piece.offset, piece.shape) == (tuple(offset), tuple(shape)):
                return self._rows(piece, entry.dtype, 0, shape[0] if shape else 1).view(piece.shape)

        # Look at all files before allocating: a hostile manifest must not make us allocate what no file holds.
        for piece in entry.pieces:
            self._locate(piece, entry.dtype)

        # Put the slice together from the pieces that it overlaps. `low` and `high` are the corners of an overlap.
        result = torch.empty(tuple(shape), dtype=DTYPES[entry.dtype])
        for piece in entry.pieces:
            low = [max(a, b) for a, b in zip(offset, piece.offset, strict=True)]
            high = [min(a, b + n) for a, b, n in zip(ends, piece.offset, piece.shape, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                # Along the first dimension, no other row is read; along the others, more than needed may be.
                rows = self._rows(piece, entry.dtype, low[0] - piece.offset[0], high[0] - piece.offset[0])
                inner = _between(low, high, piece.offset)[1:]
                result[_between(low, high, offset)] = rows[(slice(None), *inner)]
        return result

    def _rows(self, piece: Piece, dtype: str, first: int, last: int) -> torch.Tensor:
        """Read some rows of a piece, which lie together in the file."""
        stored = self._locate(piece, dtype)
        row_shape = piece.shape[1:]
        row_bytes = math.prod(row_shape) * SIZES[dtype]

        # The file is read into the tensor's own memory, possibly a part at a time.
        data = torch.empty((last - first) * row_bytes, dtype=torch.uint8)
        rest = data.numpy().data
        with open_file(self.checkpoint, piece.file) as file:
            file.seek(stored.start + first * row_bytes)
            while rest and (count := file.readinto(rest)):
                rest = rest[count:]
        if rest:
            raise Damaged(self.checkpoint, piece.file, "ends too early")

        return data.view(DTYPES[dtype]).view(last - first, *row_shape)

    def _locate(self, piece: Piece, dtype: str) -> Stored:
        if piece.file not in self._headers:
            self._headers[piece.file] = read_header(self.checkpoint, piece.file)
        return locate(self.checkpoint, self._headers[piece.file], piece, dtype)

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self.manifest.tensors[self.original(name)]
        except KeyError:
            raise KeyError(f"the checkpoint {self.checkpoint.name} has no tensor {name!r}") from None


def _between(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of what lies between two corners, in a tensor that begins at `origin`."""
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
