"""One rank's file in the safetensors format: its layout before it is written, its header when it is read.

The safetensors library could write the same file, but not from a buffer that is laid out already, nor past the page
cache. No torch here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.checkpoint.manifest import (
    SIZES,
    Damaged,
    File,
    Manifest,
    Piece,
    check_counts,
    check_fields,
    open_file,
    parse_json,
    read_manifest,
    verify_file,
)
from lockstep.checkpoint.storage import PAGE, Checkpoint

# Bytes; what the safetensors library accepts.
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class PieceToWrite:
    """A piece of the tensor `name`, before it is written: everything that the manifest says of it but the file."""

    name: str
    dtype: str
    full_shape: tuple[int, ...]  # of the tensor
    offset: tuple[int, ...]  # where in the tensor the piece begins
    shape: tuple[int, ...]  # of the piece

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]


@dataclass(frozen=True)
class FileLayout:
    """Where each piece lies in a file: a header, and a data section without gaps."""

    # `keys` are the names in the file, `starts` count from the beginning of the data section; one for each piece.
    pieces: tuple[PieceToWrite, ...]
    keys: tuple[str, ...]
    starts: tuple[int, ...]

    size: int  # of the data section
    header: bytes

    @property
    def file_size(self) -> int:
        return len(self.header) + self.size


@dataclass(frozen=True)
class Stored:
    """One tensor of a file; `start` counts from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int


def part_name(rank: int) -> str:
    return f"part-{rank:05d}.safetensors"


# ---- writing ----


def arrange(pieces: Sequence[PieceToWrite]) -> FileLayout:
    """Lay out `pieces`, wide elements first: the format allows no gaps, and this way every tensor is still aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    keys = [piece.name for piece in pieces]
    starts = [0] * len(pieces)
    position = 0

    for index in sorted(range(len(pieces)), key=lambda index: -SIZES[pieces[index].dtype]):
        # A rank may hold several pieces of one tensor, and a tensor may be called "__metadata__".
        if keys[index] in header:
            keys[index] += f"#{index}"

        piece = pieces[index]
        starts[index] = position
        position += piece.bytes
        header[keys[index]] = {
            "dtype": piece.dtype,
            "shape": piece.shape,
            "data_offsets": [starts[index], position],
        }

    # The data begin at a page, where direct writes may begin.
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    header_bytes = len(text).to_bytes(8, "little") + text
    return FileLayout(tuple(pieces), tuple(keys), tuple(starts), position, header_bytes)


# ---- reading ----


def verify(checkpoint: Checkpoint, rank: int = 0, size: int = 1) -> tuple[Manifest | None, list[Damaged]]:
    """Return the manifest, and what is wrong with it or with its files. Of `size` ranks, each reads its own share."""
    try:
        manifest = read_manifest(checkpoint)
    except Damaged as damaged:
        return None, [damaged]
    return manifest, find_problems(checkpoint, manifest, manifest.files[rank::size])


def find_problems(checkpoint: Checkpoint, manifest: Manifest, files: Sequence[File]) -> list[Damaged]:
    """Return what is wrong with `files`: a size, a digest, or a piece that the manifest expects and a file lacks."""
    # The pieces that the manifest expects in each file, with their dtypes.
    expected: dict[str, list[tuple[Piece, str]]] = {}
    for entry in manifest.tensors.values():
        for piece in entry.pieces:
            expected.setdefault(piece.file, []).append((piece, entry.dtype))

    # One problem a file is enough: a wrong digest explains a wrong header.
    problems = []
    for file in files:
        try:
            verify_file(checkpoint, file)
            header = read_header(checkpoint, file.name)
            for piece, dtype in expected.get(file.name, []):
                locate(checkpoint, header, piece, dtype)
        except Damaged as damaged:
            problems.append(damaged)
    return problems


def read_header(checkpoint: Checkpoint, name: str) -> dict[str, Stored]:
    """Return the tensors of one file by key, or raise Damaged."""
    try:
        with open_file(checkpoint, name) as stream:
            size = stream.seek(0, 2)
            stream.seek(0)

            # Eight bytes with the length of the header, the header as JSON, the data.
            length = int.from_bytes(stream.read(8), "little")
            if length > min(_LONGEST_HEADER, size - 8):
                raise ValueError("the header is longer than the file")
            entries = parse_json(stream.read(length))

        if not isinstance(entries, dict):
            raise ValueError("the header is not an object")
        entries.pop("__metadata__", None)
        return {key: _stored(repr(key), item, 8 + length, size) for key, item in entries.items()}
    except (ValueError, RecursionError) as error:
        raise Damaged(checkpoint, name, f"not a safetensors file: {error}"[:300]) from None


def _stored(what: str, item: Any, data: int, size: int) -> Stored:
    """Check one entry of a header. `data` is where the data section begins, `size` that of the file."""
    fields = check_fields(item, what, dtype=str, shape=list, data_offsets=list)
    dtype = fields["dtype"]
    shape = check_counts(fields["shape"], f"the shape of {what}")
    offsets = check_counts(fields["data_offsets"], f"an offset of {what}")
    if dtype not in SIZES or len(offsets) != 2:
        raise ValueError(f"{what} has an unknown dtype, or not two offsets")

    # Python's integers do not overflow: a huge shape is simply not as long as its data.
    begin, end = offsets
    if begin + math.prod(shape) * SIZES[dtype] != end or data + end > size:
        raise ValueError(f"{what} does not lie in the file")
    return Stored(dtype, shape, data + begin)


def locate(checkpoint: Checkpoint, header: dict[str, Stored], piece: Piece, dtype: str) -> Stored:
    """Return where `piece` lies. Raise Damaged if its file holds no such piece, or another one by that name."""
    stored = header.get(piece.key)
    if stored is None or (stored.dtype, stored.shape) != (dtype, piece.shape):
        raise Damaged(checkpoint, piece.file, f"does not hold the piece {piece.key!r} that the manifest expects there")
    return stored
