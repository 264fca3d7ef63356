"""What a checkpoint contains. Nothing that is read here is trusted: every field is checked before it is used."""

from __future__ import annotations

import math
import os
import re
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from lockstep.checkpoint import json_values
from lockstep.launch.run_dir import MANIFEST as NAME

FORMAT = 1
SIZES = {  # bytes of one element; the names are those of safetensors
    **{"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1},
    **{"I16": 2, "U16": 2, "F16": 2, "BF16": 2},
    **{"I32": 4, "U32": 4, "F32": 4},
    **{"I64": 8, "U64": 8, "F64": 8},
}
_LARGEST = 2**60  # bytes of a tensor or a file; more is a lie, and would overflow further down
_READ = 8 << 20  # bytes at a time
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")


class Damaged(Exception):
    """A checkpoint that must not be loaded: which file of it, and why."""

    def __init__(self, path: Path, file: str, why: str):
        super().__init__(path, file, why)
        self.path, self.file, self.why = path, file, why

    def __str__(self) -> str:
        return f"{self.path.name}/{self.file}: {self.why}"


@dataclass(frozen=True)
class File:
    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class Piece:
    """A block of a tensor: it lies at `offset` in the whole, and is the tensor `key` of `file`."""

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    step: int
    time: float
    lockstep: str
    files: tuple[File, ...]
    tensors: dict[str, TensorEntry]
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def metrics(self) -> dict[str, float]:
        found = self.values.get("metrics")
        return found if isinstance(found, dict) else {}


def encode(manifest: Manifest) -> bytes:
    content = {**asdict(manifest), "values": json_values.to_json(manifest.values)}
    digest = xxhash.xxh3_128(json_values.canonical(content)).hexdigest()
    return json_values.canonical({"format": FORMAT, "digest": digest, "content": content})


def decode(data: bytes, folder: Path) -> Manifest:
    """The manifest in `data`, which was found in `folder`. Damaged, and no other exception, if anything is wrong."""
    try:
        outer = _record(json_values.parse(data), "the manifest", "format", "digest", "content")
        if outer["format"] != FORMAT or isinstance(outer["format"], bool):
            raise ValueError(f"format {str(outer['format'])[:40]}; this version of Lockstep reads format {FORMAT}")
        if outer["digest"] != xxhash.xxh3_128(json_values.canonical(outer["content"])).hexdigest():
            raise ValueError("the contents do not have the digest that was written with them")
        return _manifest(outer["content"])
    except (ValueError, RecursionError) as error:
        raise Damaged(folder, NAME, str(error)[:300] or "nested too deep") from None


def read_manifest(folder: Path) -> Manifest:
    try:
        return decode((folder / NAME).read_bytes(), folder)
    except OSError as error:
        raise Damaged(folder, NAME, _spoken_error(error)) from None


def check_size(folder: Path, file: File) -> None:
    """What can be known about a file without reading it; Damaged if it is missing, or too long or short."""
    try:
        found = os.stat(folder / file.name)
    except OSError as error:
        raise Damaged(folder, file.name, _spoken_error(error)) from None
    if not stat.S_ISREG(found.st_mode):
        raise Damaged(folder, file.name, "not a file")
    if found.st_size != file.size:
        raise Damaged(folder, file.name, f"{found.st_size:,} bytes, and {file.size:,} were written")


def verify_file(folder: Path, file: File) -> None:
    """Size and digest of one file, read from the disk; Damaged if they are not what was written."""
    check_size(folder, file)
    digest, size = xxhash.xxh3_128(), 0
    try:
        with open(folder / file.name, "rb", buffering=0) as stream:
            while chunk := stream.read(_READ):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise Damaged(folder, file.name, _spoken_error(error)) from None
    if (size, digest.hexdigest()) != (file.size, file.digest):
        raise Damaged(folder, file.name, "the bytes changed since they were written (digest differs)")


def _spoken_error(error: OSError) -> str:
    return "missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror or error}"


# ---- every field, checked ----


def _manifest(content: Any) -> Manifest:
    fields = _record(content, "content", "step", "time", "lockstep", "files", "tensors", "aliases", "values")
    files = tuple(_file(item) for item in _list(fields["files"], "files"))
    names = {file.name for file in files}
    if len(names) < len(files):
        raise ValueError("a file is listed twice")
    tensors = {name: _tensor(name, item, names) for name, item in _dict(fields["tensors"], "tensors").items()}
    used = [(piece.file, piece.key) for entry in tensors.values() for piece in entry.pieces]
    if len(set(used)) < len(used):
        raise ValueError("two pieces are the same tensor of the same file")
    aliases = _dict(fields["aliases"], "aliases")
    for name, target in aliases.items():
        if not isinstance(target, str) or target not in tensors or name in tensors:
            raise ValueError(f"the alias {name!r} leads nowhere")
    return Manifest(
        step=_count(fields["step"], "step"),
        time=_time(fields["time"]),
        lockstep=_text(fields["lockstep"], "lockstep"),
        files=files,
        tensors=tensors,
        aliases=aliases,
        values=_dict(json_values.from_json(_dict(fields["values"], "values")), "values"),
    )


def _file(item: Any) -> File:
    fields = _record(item, "a file", "name", "size", "digest")
    name = _text(fields["name"], "a file's name")
    if not _PLAIN_NAME.fullmatch(name) or name == NAME:
        raise ValueError(f"{name[:60]!r} is not a plain file name")
    return File(name, _count(fields["size"], f"the size of {name}"), _text(fields["digest"], f"the digest of {name}"))


def _tensor(name: str, item: Any, files: set[str]) -> TensorEntry:
    what = f"tensor {name!r}"
    fields = _record(item, what, "dtype", "shape", "pieces")
    dtype = _text(fields["dtype"], f"the dtype of {what}")
    if dtype not in SIZES:
        raise ValueError(f"{what} has the unknown dtype {dtype[:40]!r}")
    shape = _counts(fields["shape"], f"the shape of {what}")
    if math.prod(max(length, 1) for length in shape) * SIZES[dtype] > _LARGEST:
        raise ValueError(f"{what} would be too large")
    pieces = tuple(_piece(piece, what, shape, files) for piece in _list(fields["pieces"], f"the pieces of {what}"))
    _check_cover(what, shape, pieces)
    return TensorEntry(dtype, shape, pieces)


def _piece(item: Any, what: str, whole: tuple[int, ...], files: set[str]) -> Piece:
    fields = _record(item, f"a piece of {what}", "file", "key", "offset", "shape")
    file, key = _text(fields["file"], f"a file of {what}"), _text(fields["key"], f"a key of {what}")
    offset, shape = _counts(fields["offset"], f"an offset of {what}"), _counts(fields["shape"], f"a piece of {what}")
    if file not in files:
        raise ValueError(f"{what} is in {file[:60]!r}, which is not listed")
    if len(offset) != len(whole) or len(shape) != len(whole):
        raise ValueError(f"a piece of {what} has another number of dimensions")
    if any(start + length > limit for start, length, limit in zip(offset, shape, whole, strict=True)):
        raise ValueError(f"a piece of {what} reaches beyond it")
    return Piece(file, key, offset, shape)


def _check_cover(what: str, shape: tuple[int, ...], pieces: tuple[Piece, ...]) -> None:
    """Every element in exactly one piece: the volumes add up, and no two pieces overlap."""
    solid = [piece for piece in pieces if math.prod(piece.shape)]
    if sum(math.prod(piece.shape) for piece in solid) != math.prod(shape):
        raise ValueError(f"the pieces of {what} do not make up the whole of it")
    if len(solid) < 2:
        return
    # Sweep along the axis that is cut most: a piece is compared with those it meets there, not with all.
    axis = max(range(len(shape)), key=lambda axis: len({piece.offset[axis] for piece in solid}))
    active: list[Piece] = []
    for piece in sorted(solid, key=lambda piece: piece.offset[axis]):
        active = [other for other in active if other.offset[axis] + other.shape[axis] > piece.offset[axis]]
        if any(_overlap(piece, other) for other in active):
            raise ValueError(f"two pieces of {what} overlap")
        active.append(piece)


def _overlap(one: Piece, other: Piece) -> bool:
    sides = zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    return all(a < b + b_length and b < a + a_length for a, a_length, b, b_length in sides)


def _record(value: Any, what: str, *keys: str) -> dict[str, Any]:
    found = _dict(value, what)
    if found.keys() != set(keys):
        odd = sorted(found.keys() ^ set(keys))
        raise ValueError(f"{what} has missing or unknown keys: {', '.join(odd)[:100]}")
    return found


def _dict(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not an object")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} is not a list")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is not a text")
    return value


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError(f"{what} is no count")
    return value


def _counts(value: Any, what: str) -> tuple[int, ...]:
    if len(_list(value, what)) > 64:  # as many dimensions as torch knows
        raise ValueError(f"{what} has too many dimensions")
    return tuple(_count(item, what) for item in value)


def _time(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e11:  # seconds; the year 5138 is far enough
        raise ValueError("time is no time")
    return float(value)
