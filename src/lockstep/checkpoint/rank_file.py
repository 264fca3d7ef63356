"""One rank's file in the safetensors format: its layout for writing, and its header for reading.

The safetensors library could write the same file, but not from a buffer that already is the data section, and not with
O_DIRECT. This module does not import torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep.checkpoint.manifest import DTYPES, Damaged, Piece, TensorEntry, byte_count
from lockstep.checkpoint.manifest_reader import check_counts, check_fields, open_file, parse_json, require
from lockstep.checkpoint.storage.durable import PAGE
from lockstep.checkpoint.storage.folder import Checkpoint


class HeaderEntry(NamedTuple):
    """One tensor of a file, as the header describes it."""

    dtype: str
    shape: tuple[int, ...]
    position: int  # of its first byte in the file


# The tensors of a file, by name.
Header = dict[str, HeaderEntry]


@dataclass(frozen=True)
class FileLayout:
    """The layout of a file: a header, and a data section with one piece of each tensor, without gaps."""

    tensors: dict[str, TensorEntry]  # as in the manifest, but with the piece in this file only
    byte_ranges: dict[str, slice]  # of each piece in the data section
    size: int  # of the data section
    header: bytes

    @property
    def file_size(self) -> int:
        return len(self.header) + self.size


def arrange(tensors: dict[str, TensorEntry]) -> FileLayout:
    """Lay out one piece of each tensor.

    The largest dtype comes first, which aligns every piece without the gaps that safetensors forbids.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    assert not header.keys() & tensors.keys(), "safetensors reserves the name __metadata__"

    byte_ranges = {}
    position = 0

    # `sorted` is stable: tensors of one dtype stay in their order.
    for name, entry in sorted(tensors.items(), key=lambda item: -DTYPES[item[1].dtype].bytes):
        [piece] = entry.pieces
        start = position
        position += byte_count(piece.shape, entry.dtype)
        byte_ranges[name] = slice(start, position)
        header[name] = {"dtype": entry.dtype, "shape": piece.shape, "data_offsets": [start, position]}

    # Pad the header so that the data section begins at a page, as direct writes require.
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return FileLayout(tensors, byte_ranges, position, len(text).to_bytes(8, "little") + text)


def read_header(checkpoint: Checkpoint, name: str) -> Header:
    """Read the header of one file and check every entry. Raise Damaged if an entry is invalid."""
    try:
        with open_file(checkpoint, name) as stream:
            size = stream.seek(0, 2)
            stream.seek(0)

            # A file consists of eight bytes with the length of the header, the header as JSON, and the data. The
            # safetensors library accepts a header of up to 100 MB.
            length = int.from_bytes(stream.read(8), "little")
            require(length <= min(100_000_000, size - 8), "the header is longer than the file")
            entries = parse_json(stream.read(length))

        require(isinstance(entries, dict), "the header is not an object")
        entries.pop("__metadata__", None)
        return {key: _header_entry(repr(key), item, 8 + length, size) for key, item in entries.items()}
    except (ValueError, RecursionError) as error:
        raise Damaged(checkpoint, name, f"not a safetensors file: {error}"[:300]) from None


def _header_entry(what: str, item: Any, data_start: int, file_size: int) -> HeaderEntry:
    """Check an entry of a safetensors header, and return it with its position in the file."""
    fields = check_fields(item, what, dtype=str, shape=list, data_offsets=list)

    dtype = fields["dtype"]
    shape = check_counts(fields["shape"], what, "shape")
    offsets = check_counts(fields["data_offsets"], what, "data_offsets")
    require(dtype in DTYPES and len(offsets) == 2, f"{what} has an unknown dtype, or not two offsets")

    # Python's integers do not overflow, so this also refuses a huge shape.
    start, end = offsets
    fits = start + byte_count(shape, dtype) == end <= file_size - data_start
    require(fits, f"{what} does not lie in the file")
    return HeaderEntry(dtype, shape, data_start + start)


def locate(checkpoint: Checkpoint, header: Header, name: str, piece: Piece, dtype: str) -> int:
    """Return the position of a piece of the tensor `name` in its file. Raise Damaged if the file does not hold it."""
    entry = header.get(name)
    if entry is None or (entry.dtype, entry.shape) != (dtype, piece.shape):
        raise Damaged(checkpoint, piece.file, f"does not hold the piece of {name!r} that the manifest expects there")

    return entry.position
