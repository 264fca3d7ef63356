"""The manifest of a checkpoint: which tensor is where, every plain value, and the size and digest of each file.

Nothing that is read here is trusted: every field is checked before it is used, and a manifest that is wrong in any way
raises `Damaged` and no other exception. Plain values are strict JSON, which has no NaN and no infinity: such a number
becomes `{"$float": "nan"}`. A dict of the user that could be mistaken for this (one key, which begins with "$") gets
one more "$", and loses it again when it is read. No torch here.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from lockstep.checkpoint.storage import Checkpoint
from lockstep.errors import UserError
from lockstep.launch.run_dir import MANIFEST as NAME

# Of the manifest. A checkpoint with another number is not read.
FORMAT = 1

# Bytes of one element; the names are those of safetensors.
SIZES = {
    **{"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1},
    **{"I16": 2, "U16": 2, "F16": 2, "BF16": 2},
    **{"I32": 4, "U32": 4, "F32": 4},
    **{"I64": 8, "U64": 8, "F64": 8},
}

# Bytes of a tensor or a file. A larger number is a lie, and would overflow further down.
_LARGEST = 2**60

# As many as torch knows.
_MOST_DIMENSIONS = 64

# Seconds since 1970: the year 5138.
_END_OF_TIME = 1e11

# Bytes that are read, and digested, at a time.
_READ = 8 << 20

# No separator, and no dot at the beginning.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Damaged(Exception):
    """A checkpoint that must not be loaded: which file of it, and why."""

    def __init__(self, checkpoint: Checkpoint, file: str, why: str):
        super().__init__(checkpoint, file, why)
        self.checkpoint = checkpoint
        self.file = file
        self.why = why

    def __str__(self) -> str:
        return f"{self.checkpoint.name}/{self.file}: {self.why}"


@dataclass(frozen=True)
class File:
    """One rank's file, as it was written."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class Piece:
    """A block of a tensor: it lies at `offset` in the full tensor, and is the tensor `key` of `file`."""

    file: str
    key: str

    # In the full tensor.
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A full tensor, and the pieces that make it up."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """Everything a checkpoint says about itself. Its field names are those of the file."""

    step: int

    # Seconds since 1970, and the version that wrote it.
    time: float
    lockstep: str

    files: tuple[File, ...]
    tensors: dict[str, TensorEntry]

    # Other names of tied tensors: {name: name of the tensor that is stored}.
    aliases: dict[str, str] = field(default_factory=dict)

    # Everything else that was saved.
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def metrics(self) -> dict[str, float]:
        found = self.values.get("metrics")
        return found if isinstance(found, dict) else {}


def encode(manifest: Manifest) -> bytes:
    """Return the file `manifest.json`, with a digest of its own contents."""
    content = {**asdict(manifest), "values": to_json(manifest.values)}
    return _canonical({"format": FORMAT, "digest": _digest(content), "content": content})


def decode(data: bytes, checkpoint: Checkpoint) -> Manifest:
    """Return the manifest in `data`, which was found in `checkpoint`. Raise Damaged if anything about it is wrong."""
    try:
        outer = _record(parse_json(data), "the manifest", "format", "digest", "content")

        # True equals 1, and is not a format.
        if outer["format"] != FORMAT or isinstance(outer["format"], bool):
            raise ValueError(f"format {str(outer['format'])[:40]}; this version of Lockstep reads format {FORMAT}")

        if outer["digest"] != _digest(outer["content"]):
            raise ValueError("the contents do not have the digest that was written with them")
        return _manifest(outer["content"])
    except (ValueError, RecursionError) as error:
        raise Damaged(checkpoint, NAME, str(error)[:300] or "nested too deep") from None


def read_manifest(checkpoint: Checkpoint) -> Manifest:
    """Read the manifest of a checkpoint, or raise Damaged."""
    try:
        with checkpoint.open(NAME) as stream:
            data = stream.read()
    except OSError as error:
        raise _unreadable(checkpoint, NAME, error) from None
    return decode(data, checkpoint)


def check_size(checkpoint: Checkpoint, file: File) -> None:
    """Raise Damaged if a file is missing, too long or too short. Its contents are not read."""
    try:
        with checkpoint.open(file.name) as stream:
            size = stream.seek(0, 2)
    except OSError as error:
        raise _unreadable(checkpoint, file.name, error) from None
    if size != file.size:
        raise Damaged(checkpoint, file.name, f"{size:,} bytes, and {file.size:,} were written")


def verify_file(checkpoint: Checkpoint, file: File) -> None:
    """Read a file to its end, and raise Damaged if its size or digest is not what was written."""
    # Cheap to know, and a better message than a wrong digest.
    check_size(checkpoint, file)

    digest = xxhash.xxh3_128()
    size = 0
    try:
        with checkpoint.open(file.name) as stream:
            while chunk := stream.read(_READ):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise _unreadable(checkpoint, file.name, error) from None
    if (size, digest.hexdigest()) != (file.size, file.digest):
        raise Damaged(checkpoint, file.name, "the bytes changed since they were written (digest differs)")


def _unreadable(checkpoint: Checkpoint, file: str, error: OSError) -> Damaged:
    missing = isinstance(error, FileNotFoundError)
    return Damaged(checkpoint, file, "missing" if missing else f"cannot be read: {error.strerror or error}")


# ---- plain values as JSON ----


def to_json(value: Any, where: str = "values") -> Any:
    """Return a copy that JSON can hold. Raise an error that names the place of what it cannot hold."""
    if value is None or isinstance(value, bool | str):
        return value

    # Of a subclass, such as an enum, the plain number.
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}

    if isinstance(value, list | tuple):
        return [to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]

    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise _not_json(f"the key {key!r} of {where}", key)

        # One more "$" for a dict that looks like one of ours.
        inner = {key: to_json(item, f"{where}.{key}") for key, item in value.items()}
        if _is_marked(inner):
            return {f"${key}": item for key, item in inner.items()}
        return inner

    raise _not_json(where, value)


def from_json(value: Any) -> Any:
    """Return what `to_json` was given, tuples as lists. Raise ValueError where the encoding is wrong."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if not _is_marked(value):
        return {key: from_json(item) for key, item in value.items()}

    [(key, item)] = value.items()
    if key.startswith("$$"):
        return {key[1:]: from_json(item)}

    if key != "$float" or not isinstance(item, str) or item not in _FLOATS:
        raise ValueError(f"{key} = {str(item)[:40]!r} stands for no number")
    return _FLOATS[item]


def parse_json(data: bytes) -> Any:
    """Parse strict JSON: no NaN, and no key twice. Raise ValueError or RecursionError if it is anything else."""
    return json.loads(data, object_pairs_hook=_unique, parse_constant=_refuse_constant)


def _canonical(value: Any) -> bytes:
    """Write `value` in one fixed way, so that equal values have equal digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _digest(content: Any) -> str:
    return xxhash.xxh3_128(_canonical(content)).hexdigest()


def _is_marked(value: dict[str, Any]) -> bool:
    return len(value) == 1 and next(iter(value)).startswith("$")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _not_json(where: str, value: object) -> UserError:
    return UserError(
        f"{where} cannot be saved in a checkpoint: JSON has no {type(value).__name__}",
        "",
        "keep state in tensors, numbers, strings, lists and dicts with string keys",
    )


# ---- every field, checked ----


def _manifest(content: Any) -> Manifest:
    fields = _record(content, "content", "step", "time", "lockstep", "files", "tensors", "aliases", "values")

    files = tuple(_file(item) for item in _list(fields["files"], "files"))
    names = {file.name for file in files}
    if len(names) < len(files):
        raise ValueError("a file is listed twice")

    # Each tensor of a file belongs to one piece; else a small file could stand for many large tensors.
    tensors = {name: _tensor(name, item, names) for name, item in _dict(fields["tensors"], "tensors").items()}
    used = [(piece.file, piece.key) for entry in tensors.values() for piece in entry.pieces]
    if len(set(used)) < len(used):
        raise ValueError("two pieces are the same tensor of the same file")

    # An alias leads to a tensor, not to another alias.
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
        values=_dict(from_json(_dict(fields["values"], "values")), "values"),
    )


def _file(item: Any) -> File:
    fields = _record(item, "a file", "name", "size", "digest")
    name = _text(fields["name"], "a file's name")

    # A name such as "../x" would lead out of the checkpoint.
    if not _PLAIN_NAME.fullmatch(name) or name == NAME:
        raise ValueError(f"{name[:60]!r} is not a plain file name")
    return File(name, _count(fields["size"], f"the size of {name}"), _text(fields["digest"], f"the digest of {name}"))


def _tensor(name: str, item: Any, files: set[str]) -> TensorEntry:
    what = f"tensor {name!r}"
    fields = _record(item, what, "dtype", "shape", "pieces")

    dtype = _text(fields["dtype"], f"the dtype of {what}")
    if dtype not in SIZES:
        raise ValueError(f"{what} has the unknown dtype {dtype[:40]!r}")

    # A dimension of 0 must not hide the size of the others: torch multiplies them, too.
    shape = _counts(fields["shape"], f"the shape of {what}")
    if math.prod(max(length, 1) for length in shape) * SIZES[dtype] > _LARGEST:
        raise ValueError(f"{what} would be too large")

    # Together, the pieces are the tensor.
    pieces = tuple(_piece(piece, what, shape, files) for piece in _list(fields["pieces"], f"the pieces of {what}"))
    _check_cover(what, shape, pieces)
    return TensorEntry(dtype, shape, pieces)


def _piece(item: Any, what: str, full_shape: tuple[int, ...], files: set[str]) -> Piece:
    fields = _record(item, f"a piece of {what}", "file", "key", "offset", "shape")
    file = _text(fields["file"], f"a file of {what}")
    key = _text(fields["key"], f"a key of {what}")
    offset = _counts(fields["offset"], f"an offset of {what}")
    shape = _counts(fields["shape"], f"a piece of {what}")

    # Only listed files have a digest.
    if file not in files:
        raise ValueError(f"{what} is in {file[:60]!r}, which is not listed")

    if len(offset) != len(full_shape) or len(shape) != len(full_shape):
        raise ValueError(f"a piece of {what} has another number of dimensions")
    if any(start + length > limit for start, length, limit in zip(offset, shape, full_shape, strict=True)):
        raise ValueError(f"a piece of {what} reaches beyond it")
    return Piece(file, key, offset, shape)


def _check_cover(what: str, shape: tuple[int, ...], pieces: tuple[Piece, ...]) -> None:
    """Check that every element is in exactly one piece: the volumes add up, and no two pieces overlap."""
    # A rank without rows writes an empty piece, which overlaps nothing.
    solid = [piece for piece in pieces if math.prod(piece.shape)]
    if sum(math.prod(piece.shape) for piece in solid) != math.prod(shape):
        raise ValueError(f"the pieces of {what} do not make up the whole of it")
    if len(solid) < 2:
        return

    # Sweep along the dimension with the most pieces: each is compared with those it meets there, not with all.
    dim = max(range(len(shape)), key=lambda dim: len({piece.offset[dim] for piece in solid}))
    active: list[Piece] = []
    for piece in sorted(solid, key=lambda piece: piece.offset[dim]):
        # Forget those that end before this piece begins.
        active = [other for other in active if other.offset[dim] + other.shape[dim] > piece.offset[dim]]
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
        raise ValueError(f"{what} is not text")
    return value


def _count(value: Any, what: str) -> int:
    # `type is`, not isinstance: True is an int, too.
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError(f"{what} is not a count")
    return value


def _counts(value: Any, what: str) -> tuple[int, ...]:
    if len(_list(value, what)) > _MOST_DIMENSIONS:
        raise ValueError(f"{what} has too many dimensions")
    return tuple(_count(item, what) for item in value)


def _time(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < _END_OF_TIME:
        raise ValueError("time is not a time")
    return float(value)
