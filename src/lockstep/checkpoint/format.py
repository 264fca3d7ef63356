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

from lockstep.checkpoint.manifest import SIZES, Damaged, File, Manifest, parse_json, verify_file
from lockstep.checkpoint.storage import PAGE, Checkpoint

# Bytes; what the safetensors library accepts.
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Block:
    """A block of a tensor as it will be written: everything the manifest says of it but the file."""

    name: str
    dtype: str

    # Of the full tensor, and where in it this block begins.
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]

    # Of the block itself.
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]


@dataclass(frozen=True)
class Layout:
    """Where each block lies in a file: a header, and a data section without gaps."""

    # `order[i]` is the number of the block that comes i-th; `keys` and `starts` have the same order.
    order: tuple[int, ...]

    # The names of the blocks in the file, and where they begin in the data section.
    keys: tuple[str, ...]
    starts: tuple[int, ...]

    # Bytes of the data section.
    size: int

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


def arrange(blocks: Sequence[Block]) -> Layout:
    """Lay out `blocks`, wide elements first: the format allows no gaps, and this way every tensor is still aligned."""
    order = tuple(sorted(range(len(blocks)), key=lambda index: -SIZES[blocks[index].dtype]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    keys = []
    starts = []
    position = 0

    for index in order:
        block = blocks[index]

        # A rank may hold several blocks of one tensor, and a tensor may be called "__metadata__".
        key = block.name if block.name not in header else f"{block.name}#{index}"

        end = position + block.bytes
        header[key] = {"dtype": block.dtype, "shape": block.shape, "data_offsets": [position, end]}
        keys.append(key)
        starts.append(position)
        position = end

    # The data begin at a page, where direct writes may begin.
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return Layout(order, tuple(keys), tuple(starts), position, len(text).to_bytes(8, "little") + text)


def read_header(checkpoint: Checkpoint, name: str) -> dict[str, Stored]:
    """Return the tensors of one file by key, or raise Damaged."""
    try:
        with checkpoint.open(name) as stream:
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
        return {key: _stored(key, item, 8 + length, size) for key, item in entries.items()}
    except OSError as error:
        raise Damaged(checkpoint, name, f"cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(checkpoint, name, f"not a safetensors file: {error}"[:300]) from None


def find_problems(checkpoint: Checkpoint, manifest: Manifest, files: Sequence[File]) -> list[Damaged]:
    """Return what is wrong with `files`: a size, a digest, or a piece that the manifest expects and a file lacks."""
    # What the manifest expects of each file: key, dtype and shape of its pieces.
    expected: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {}
    for entry in manifest.tensors.values():
        for piece in entry.pieces:
            expected.setdefault(piece.file, []).append((piece.key, entry.dtype, piece.shape))

    # One problem a file is enough: a wrong digest explains a wrong header.
    found = []
    for file in files:
        try:
            verify_file(checkpoint, file)
            stored = read_header(checkpoint, file.name)
            for key, dtype, shape in expected.get(file.name, []):
                locate(checkpoint, file.name, key, stored, dtype, shape)
        except Damaged as damaged:
            found.append(damaged)
    return found


def locate(
    checkpoint: Checkpoint, file: str, key: str, stored: dict[str, Stored], dtype: str, shape: tuple[int, ...]
) -> Stored:
    """Return where the piece `key` lies. Raise Damaged if the file holds no such piece, or another one by that name."""
    found = stored.get(key)
    if found is None or (found.dtype, found.shape) != (dtype, shape):
        raise Damaged(checkpoint, file, f"does not hold the piece {key!r} that the manifest expects there")
    return found


def _stored(key: str, item: Any, data: int, size: int) -> Stored:
    """Check one entry of a header. `data` is where the data section begins, `size` that of the file."""
    if not isinstance(item, dict) or item.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{key!r} is described wrongly")
    dtype = item["dtype"]
    shape = item["shape"]
    offsets = item["data_offsets"]

    if not isinstance(dtype, str) or dtype not in SIZES:
        raise ValueError(f"{key!r} has an unknown dtype")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError(f"{key!r} has no shape or no offsets")
    if any(type(number) is not int or number < 0 for number in (*shape, *offsets)):
        raise ValueError(f"{key!r} has a number that is not a count")

    # Python's integers do not overflow: a huge shape is simply not as long as its data.
    begin, end = offsets
    if begin + math.prod(shape) * SIZES[dtype] != end or data + end > size:
        raise ValueError(f"{key!r} does not lie in the file")
    return Stored(dtype, tuple(shape), data + begin)
