"""Find the newest valid checkpoint and read its tensors. All ranks agree on it before any of them changes a weight.

All files are verified against their digests before a tensor is used.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from lockstep.checkpoint.format import locate, read_header, verify
from lockstep.checkpoint.manifest import (
    DTYPES,
    Damaged,
    InvalidCheckpoint,
    Manifest,
    Piece,
    TensorEntry,
    Unreadable,
    WrongFormat,
    byte_count,
)
from lockstep.checkpoint.manifest_reader import as_invalid, open_file
from lockstep.checkpoint.storage import Checkpoint, CheckpointStorage, committed
from lockstep.errors import UserError

# How many invalid checkpoints in a row are examined before giving up.
MAX_INVALID = 50

# How many times ranks look at the folder before they conclude that their disks are separate, and the pause between two
# looks. NFS may show a directory as it was up to a minute ago.
LOOKS = 14
LOOK_PAUSE_S = 5.0

# How many times a checkpoint that cannot be read is tried again, after the same pause. A search waits no longer than
# this in all: whatever lasts is no transient error of a file server or an object store.
READ_RETRIES = 3

# How many files a reader keeps open. A rank may need those of thousands of ranks, and a process may not open so many.
MAX_OPEN_FILES = 64

# An all-gather of JSON values. All ranks call it in the same order.
Gather = Callable[[Any], list[Any]]


class ReportedProblem(NamedTuple):
    """An `InvalidCheckpoint`, as ranks send it to each other."""

    label: str  # of its class
    file: str
    why: str


def newest_valid(
    storage: CheckpointStorage, rank: int, world_size: int, gather: Gather, only: str | None = None
) -> CheckpointReader | None:
    """Return a reader of the newest valid checkpoint, or of the one named `only`; None if there is no checkpoint.

    Collective: each rank verifies every byte of its share of the files, and all ranks get the same result.
    """
    # The newest checkpoint comes first.
    names = _list_alike(storage, gather, only)
    skipped: list[InvalidCheckpoint] = []
    retries = READ_RETRIES

    for name in names:
        checkpoint = Checkpoint(storage, name)

        # All ranks have the same answers here, because `_verify_together` gathers the problems.
        manifest, problems = _verify_together(checkpoint, rank, world_size, gather)
        while problems and retries and isinstance(_invalid(checkpoint, problems), Unreadable):
            retries -= 1
            time.sleep(LOOK_PAUSE_S)
            manifest, problems = _verify_together(checkpoint, rank, world_size, gather)

        if manifest is not None and not problems:
            return CheckpointReader(checkpoint, manifest, skipped)

        skipped.append(_invalid(checkpoint, problems))

        # A bad disk damages a few checkpoints. Examining thousands of them would take too long.
        if len(skipped) >= MAX_INVALID and len(names) > MAX_INVALID:
            raise UserError(
                f"none of the newest {MAX_INVALID} of {len(names)} checkpoints in {storage.address} is valid",
                str(skipped[0]),
                "delete them, or name the checkpoint to use: --resume RUN/checkpoints/step-NNNNNNNN",
            )

    if skipped:
        raise _none_valid(storage, skipped, only)

    return None


def _verify_together(
    checkpoint: Checkpoint, rank: int, world_size: int, gather: Gather
) -> tuple[Manifest | None, list[ReportedProblem]]:
    """Verify this rank's share of the files. Return the manifest, and the problems that any rank has found."""
    manifest, problems = verify(checkpoint, rank, world_size)
    found = [ReportedProblem(problem.label, problem.file, problem.why) for problem in problems]
    results = gather([found, manifest.digest if manifest else None])

    # Each problem once, in the same order on every rank.
    found_by_any = sorted({ReportedProblem(*fields) for rank_problems, _ in results for fields in rank_problems})

    # The digests show whether all ranks read the same manifest.
    if not found_by_any and len({digest for _, digest in results}) > 1:
        raise _not_shared("the ranks read different manifests there")

    return manifest, found_by_any


def _list_alike(storage: CheckpointStorage, gather: Gather, only: str | None) -> list[str]:
    """Return the checkpoints that all ranks examine: those that rank 0 lists, or `only` this one. Collective.

    Raises a UserError if the ranks have separate disks: they would resume separately. A rank has a different disk if

    - it does not see what rank 0 listed,
    - rank 0 lists no checkpoint, but this rank does, or
    - it reads a different owner's token.
    """
    looks = 0
    while True:
        # This is also a barrier: rank 0 has claimed the folder before.
        listed = [only] if only else [checkpoint.name for checkpoint in committed(storage)]
        names = gather(listed)[0]

        # What this rank sees of that list, and of the storage.
        visible = sorted(set(names) & set(storage.folders()))
        sees_more = bool(listed) and not names
        views = gather([visible, sees_more, storage.owner()])
        differing = [rank for rank, view in enumerate(views) if view != views[0]]

        if not differing:
            return names

        # A rank may have an old listing of the directory. All ranks have the same views, so all of them look again.
        looks += 1
        if looks == LOOKS:
            raise _not_shared(f"rank {differing[0]} finds different files there than rank 0")

        time.sleep(LOOK_PAUSE_S)


def _invalid(checkpoint: Checkpoint, problems: Sequence[ReportedProblem]) -> InvalidCheckpoint:
    """Return one error for all problems of a checkpoint."""
    # The first of these kinds that any rank found counts.
    labels = {problem.label for problem in problems}
    kind = next(kind for kind in (Damaged, Unreadable, WrongFormat) if kind.label in labels)

    # The error names the first file, and its reason lists the rest.
    first = problems[0].file
    reasons = "; ".join(f"{problem.file}: {problem.why}" for problem in problems)
    return kind(checkpoint, first, reasons.removeprefix(f"{first}: "))


def _none_valid(storage: CheckpointStorage, invalid: Sequence[InvalidCheckpoint], only: str | None) -> UserError:
    """Return the error for a run without a valid checkpoint, or for one that was asked for and is not valid."""
    verdicts = sorted({problem.verdict for problem in invalid})

    what = f"the checkpoint {invalid[0].checkpoint.location}" if only else f"every checkpoint in {storage.address}"

    # A file that was damaged cannot be repaired here; the other problems can be solved.
    fix = "restore the files"
    if WrongFormat.verdict in verdicts:
        fix = "use the version of Lockstep that wrote it"
    elif Unreadable.verdict in verdicts:
        fix = "let this user read the files"

    way_out = "choose another checkpoint: lockstep ckpt ls RUN" if only else "start again in a new run_dir"
    return UserError(f"{what} {' or '.join(verdicts)}", "; ".join(map(str, invalid)), f"{fix}, or {way_out}")


def _not_shared(found: str) -> UserError:
    """Return the error for ranks that find different checkpoints."""
    return UserError(
        "run_dir is not on a file system that all ranks share",
        found,
        "set run_dir to a folder on a file system that all machines share",
    )


class CheckpointReader:
    """Reads full tensors or slices of them from a checkpoint to the CPU, however they were sharded when saved.

    It reads only the bytes that are needed, and does not check digests, which `newest_valid` has done.
    """

    def __init__(self, checkpoint: Checkpoint, manifest: Manifest, skipped: Sequence[InvalidCheckpoint] = ()):
        self.checkpoint = checkpoint
        self.manifest = manifest
        self.skipped = list(skipped)  # one entry for each newer checkpoint, all of which are invalid
        self._header = cache(partial(read_header, checkpoint))  # each file's header is read only once
        self._kept_open: dict[str, io.BufferedIOBase] | None = None  # by name; None outside of `keeping_open`

    def names(self) -> list[str]:
        """Return the names of all tensors, those of tied ones included."""
        return sorted([*self.manifest.tensors, *self.manifest.aliases])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full tensor."""
        return self._entry(name).shape

    def original(self, name: str) -> str:
        """Return the name under which a tensor is stored. Tied weights are stored under the first of their names."""
        return self.manifest.aliases.get(name, name)

    def read(self, name: str) -> torch.Tensor:
        shape = self.shape(name)
        return self.read_slice(name, (0,) * len(shape), shape)

    def read_slice(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Read the slice of `shape` that begins at `offset` in the full tensor.

        Raise InvalidCheckpoint if a file has changed or can no longer be read.
        """
        entry = self._entry(name)

        ends = [start + length for start, length in zip(offset, shape, strict=True)]
        bounds = zip(offset, ends, entry.shape, strict=True)
        if not all(0 <= start <= end <= limit for start, end, limit in bounds):
            raise ValueError(f"{name} has shape {entry.shape}; a slice {tuple(shape)} at {tuple(offset)} does not fit")

        # Usually the slice is exactly a piece that some rank wrote, and needs no second copy.
        for piece in entry.pieces:
            if (piece.offset, piece.shape) == (tuple(offset), tuple(shape)):
                return self._rows(piece, entry.dtype, 0, shape[0] if shape else 1).view(piece.shape)

        # Check all files before allocating: the shape in a manifest may be larger than the files (see `manifest`).
        for piece in entry.pieces:
            self._locate(piece, entry.dtype)

        # Assemble the slice from the pieces that it overlaps. `low` and `high` are the corners of an overlap.
        result = torch.empty(tuple(shape), dtype=_torch_dtype(entry.dtype))

        for piece in entry.pieces:
            low = [max(a, b) for a, b in zip(offset, piece.offset, strict=True)]
            high = [min(a, b + n) for a, b, n in zip(ends, piece.offset, piece.shape, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                # Read only the rows of the overlap, but each row in full.
                rows = self._rows(piece, entry.dtype, low[0] - piece.offset[0], high[0] - piece.offset[0])
                rows_offset = (low[0], *piece.offset[1:])
                result[_between(low, high, offset)] = rows[_between(low, high, rows_offset)]

        return result

    def _rows(self, piece: Piece, dtype: str, first: int, last: int) -> torch.Tensor:
        """Read the rows first .. last - 1 of a piece, which are contiguous in the file."""
        start = self._locate(piece, dtype)
        row_bytes = byte_count(piece.shape[1:], dtype)

        # Read into the tensor's own memory. `readinto` may read less than requested, and 0 bytes at the end.
        data = torch.empty((last - first) * row_bytes, dtype=torch.uint8)
        rest = data.numpy().data

        with self._open(piece.file) as file:
            file.seek(start + first * row_bytes)
            while rest:
                count = file.readinto(rest)
                if not count:
                    break

                rest = rest[count:]

        # The header was valid, so the file was truncated after it was checked.
        if rest:
            raise Damaged(self.checkpoint, piece.file, "ends too early")

        return data.view(_torch_dtype(dtype)).view(last - first, *piece.shape[1:])

    @contextmanager
    def keeping_open(self) -> Iterator[None]:
        """Keep files open from one read to the next, until the end of the block.

        In an object store, opening a file takes as long as reading a small tensor.
        """
        self._kept_open = {}
        try:
            yield
        finally:
            self._close_all(self._kept_open)
            self._kept_open = None

    @contextmanager
    def _open(self, file: str) -> Iterator[io.BufferedIOBase]:
        """Open a file, or take one that is kept open. Raises InvalidCheckpoint."""
        kept_open = self._kept_open
        if kept_open is None:
            with open_file(self.checkpoint, file) as stream:
                yield stream

            return

        if len(kept_open) == MAX_OPEN_FILES and file not in kept_open:
            self._close_all(kept_open)

        with as_invalid(self.checkpoint, file):
            if file not in kept_open:
                kept_open[file] = self.checkpoint.open(file)

            yield kept_open[file]

    def _close_all(self, streams: dict[str, io.BufferedIOBase]) -> None:
        # What was read is complete, whatever closing says.
        for stream in streams.values():
            with suppress(OSError):
                stream.close()

        streams.clear()

    def _locate(self, piece: Piece, dtype: str) -> int:
        """Return the position of a piece in its file. Raises Damaged."""
        return locate(self.checkpoint, self._header(piece.file), piece, dtype)

    def _entry(self, name: str) -> TensorEntry:
        """Return the entry of a tensor, under any of its names. Raises KeyError."""
        try:
            return self.manifest.tensors[self.original(name)]
        except KeyError:
            raise KeyError(f"the checkpoint {self.checkpoint.name} has no tensor {name!r}") from None


def _torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, DTYPES[name].in_torch)


def _between(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of the region between two corners, for a tensor that begins at `origin`."""
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
