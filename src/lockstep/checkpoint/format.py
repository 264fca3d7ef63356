"""One rank's file in the safetensors format: its layout before it is written, its header when it is read.

The safetensors library could write the same file, but neither from a buffer that is already laid out nor bypassing the
page cache. No torch here.
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
    require,
    verify_file,
)
from lockstep.checkpoint.storage import PAGE, Checkpoint

# The tensors of a file by key: dtype, shape, and where its bytes start, counted from the beginning of the file.
Header = dict[str, tuple[str, tuple[int, ...], int]]


@dataclass(frozen=True)
class PieceToWrite:
    """A piece of the tensor `name` before it is written: all that the manifest will say about it, except the file."""

    name: str  # also its key in the file
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

    pieces: tuple[PieceToWrite, ...]
    starts: tuple[int, ...]  # where each piece begins in the data section
    size: int  # of the data section
    header: bytes

    @property
    def file_size(self) -> int:
        return len(self.header) + self.size


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def arrange(pieces: Sequence[PieceToWrite]) -> FileLayout:
    """Lay out `pieces`, the widest elements first: this aligns every tensor without gaps, which the format forbids."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts = [0] * len(pieces)
    position = 0

    for index in sorted(range(len(pieces)), key=lambda index: -SIZES[pieces[index].dtype]):
        piece = pieces[index]
        if piece.name in header:
            raise ValueError(f"a rank writes one piece of each tensor, and two of {piece.name}")

        starts[index] = position
        position += piece.bytes
        header[piece.name] = {
            "dtype": piece.dtype,
            "shape": piece.shape,
            "data_offsets": [starts[index], position],
        }

    # Pad the header so that the data section begins at a page: direct writes need that.
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return FileLayout(tuple(pieces), tuple(starts), position, len(text).to_bytes(8, "little") + text)


def verify(checkpoint: Checkpoint, rank: int = 0, world_size: int = 1) -> tuple[Manifest | None, list[Damaged]]:
    """Return the manifest and what is wrong with it or with this rank's share of its files."""
    try:
        manifest = read_manifest(checkpoint)
    except Damaged as damaged:
        return None, [damaged]
    return manifest, find_problems(checkpoint, manifest, manifest.files[rank::world_size])


def find_problems(checkpoint: Checkpoint, manifest: Manifest, files: Sequence[File]) -> list[Damaged]:
    """Return what is wrong with `files`: a size, a digest, or a piece that the manifest expects and a file lacks."""
    # What the manifest expects in each file: pieces with their dtypes.
    expected: dict[str, list[tuple[Piece, str]]] = {}
    for entry in manifest.tensors.values():
        for piece in entry.pieces:
            expected.setdefault(piece.file, []).append((piece, entry.dtype))

    # One problem per file is enough: a wrong digest explains a wrong header.
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


def read_header(checkpoint: Checkpoint, name: str) -> Header:
    """Read the header of one file and check every entry. Raise Damaged if anything about it is wrong."""
    try:
        with open_file(checkpoint, name) as stream:
            size = stream.seek(0, 2)
            stream.seek(0)

            # The file is eight bytes with the length of the header, the header as JSON, the data. The safetensors
            # library accepts a header of up to 100 MB.
            length = int.from_bytes(stream.read(8), "little")
            require(length <= min(100_000_000, size - 8), "the header is longer than the file")
            entries = parse_json(stream.read(length))

        require(isinstance(entries, dict), "the header is not an object")
        entries.pop("__metadata__", None)
        return {key: _header_entry(repr(key), item, 8 + length, size) for key, item in entries.items()}
    except (ValueError, RecursionError) as error:
        raise Damaged(checkpoint, name, f"not a safetensors file: {error}"[:300]) from None


def _header_entry(what: str, item: Any, data_start: int, file_size: int) -> tuple[str, tuple[int, ...], int]:
    fields = check_fields(item, what, dtype=str, shape=list, data_offsets=list)
    dtype = fields["dtype"]
    shape = check_counts(fields["shape"], what, "shape")
    offsets = check_counts(fields["data_offsets"], what, "data_offsets")
    require(dtype in SIZES and len(offsets) == 2, f"{what} has an unknown dtype, or not two offsets")

    # Python's integers do not overflow: the bytes of a huge shape are simply not those between the offsets.
    start, end = offsets
    require(
        start + math.prod(shape) * SIZES[dtype] == end <= file_size - data_start,
        f"{what} does not lie in the file",
    )
    return dtype, shape, data_start + start


def locate(checkpoint: Checkpoint, header: Header, piece: Piece, dtype: str) -> int:
    """Return where `piece` starts in its file. Raise Damaged if the file has no such piece."""
    if piece.key not in header or header[piece.key][:2] != (dtype, piece.shape):
        raise Damaged(checkpoint, piece.file, f"does not hold the piece {piece.key!r} that the manifest expects there")
    return header[piece.key][2]
