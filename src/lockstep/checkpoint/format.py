"""One rank's file in the format of safetensors: its layout before it is written, its header when it is read."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint import json_values
from lockstep.checkpoint.durable import PAGE
from lockstep.checkpoint.manifest import SIZES, Damaged, File, Manifest, verify_file

_LONGEST_HEADER = 100_000_000  # what the safetensors library accepts


@dataclass(frozen=True)
class Block:
    """A block of a tensor as it will be written: what the manifest says of it, less the file."""

    name: str
    dtype: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]


@dataclass(frozen=True)
class Layout:
    """Where each block lies in the data section. `order[i]` is the block that comes as number i."""

    order: tuple[int, ...]
    keys: tuple[str, ...]
    starts: tuple[int, ...]
    size: int
    header: bytes

    @property
    def file_size(self) -> int:
        return len(self.header) + self.size


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: `start` counts from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int


def part_name(rank: int) -> str:
    return f"part-{rank:05d}.safetensors"


def arrange(blocks: Sequence[Block]) -> Layout:
    """Wide elements first: the format allows no gaps, and this way every tensor is still aligned."""
    order = tuple(sorted(range(len(blocks)), key=lambda index: -SIZES[blocks[index].dtype]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    keys, starts, position = [], [], 0
    for index in order:
        block = blocks[index]
        key = block.name if block.name not in header else f"{block.name}#{index}"
        end = position + block.bytes
        header[key] = {"dtype": block.dtype, "shape": block.shape, "data_offsets": [position, end]}
        keys.append(key)
        starts.append(position)
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)  # the data begin where direct writes may
    return Layout(order, tuple(keys), tuple(starts), position, len(text).to_bytes(8, "little") + text)


def read_header(folder: Path, name: str) -> dict[str, Stored]:
    """The tensors of one file, or Damaged."""
    try:
        with open(folder / name, "rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            length = int.from_bytes(stream.read(8), "little")
            if length > min(_LONGEST_HEADER, size - 8):
                raise ValueError("the header is longer than the file")
            entries = json_values.parse(stream.read(length))
        if not isinstance(entries, dict):
            raise ValueError("the header is not an object")
        return {key: _stored(key, item, 8 + length, size) for key, item in entries.items() if key != "__metadata__"}
    except OSError as error:
        raise Damaged(folder, name, f"cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(folder, name, f"not a safetensors file: {error}"[:300]) from None


def problems(folder: Path, manifest: Manifest, files: Sequence[File]) -> list[Damaged]:
    """All that is wrong with `files`: their sizes, their digests, or that they lack what the manifest expects there."""
    expected: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {}
    for entry in manifest.tensors.values():
        for piece in entry.pieces:
            expected.setdefault(piece.file, []).append((piece.key, entry.dtype, piece.shape))
    found = []
    for file in files:
        try:
            verify_file(folder, file)
            stored = read_header(folder, file.name)
            for key, dtype, shape in expected.get(file.name, []):
                check_piece(folder, file.name, key, stored, dtype, shape)
        except Damaged as damaged:
            found.append(damaged)
    return found


def check_piece(
    folder: Path, file: str, key: str, stored: dict[str, Stored], dtype: str, shape: tuple[int, ...]
) -> Stored:
    """Where the piece `key` lies; Damaged if the file does not hold it, or holds something else by that name."""
    found = stored.get(key)
    if found is None or (found.dtype, found.shape) != (dtype, shape):
        raise Damaged(folder, file, f"does not hold the piece {key!r} that the manifest expects there")
    return found


def _stored(key: str, item: Any, data: int, size: int) -> Stored:
    if not isinstance(item, dict) or item.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{key!r} is described wrongly")
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise ValueError(f"{key!r} has an unknown dtype")
    if not all(isinstance(numbers, list) for numbers in (shape, offsets)) or len(offsets) != 2:
        raise ValueError(f"{key!r} has no shape or no place")
    if any(type(number) is not int or number < 0 for number in (*shape, *offsets)):
        raise ValueError(f"{key!r} has a number that is no count")
    begin, end = offsets
    if begin + math.prod(shape) * SIZES[dtype] != end or data + end > size:
        raise ValueError(f"{key!r} does not lie in the file")
    return Stored(dtype, tuple(shape), data + begin)
