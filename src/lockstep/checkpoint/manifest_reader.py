"""Read the manifest of a checkpoint, and check every field before it is used.

A manifest is not trusted: a checkpoint may have been downloaded, or may be in another user's folder. The digest shows
whether a disk has changed the manifest, but it has no key, so anyone can write a manifest with a valid digest.
Therefore every field is checked: a manifest cannot name a file outside its folder, leave elements of a tensor
undefined, or claim more memory than its files have bytes. Any error raises `InvalidCheckpoint` and no other exception.

This module does not import torch.
"""

from __future__ import annotations

import errno
import io
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import xxhash

from lockstep import garbage
from lockstep.checkpoint.manifest import (
    DTYPES,
    FLOATS,
    FORMAT,
    Damaged,
    File,
    Forbidden,
    Manifest,
    Missing,
    Piece,
    TensorEntry,
    Unreadable,
    WrongFormat,
    byte_count,
    canonical,
)
from lockstep.checkpoint.storage.folder import Checkpoint
from lockstep.checkpoint.storage.retry import NO_RIGHT
from lockstep.run_folder.checkpoint_names import MANIFEST, step_in

# Upper limit on the size of a tensor or file, in bytes. A larger number would overflow later.
_MAX_BYTES = 2**60

# Upper limit on the size of a manifest, which is read into memory, in bytes. A piece takes about 80, so that 1,024
# ranks with shards of 2,200 tensors need a third of this.
_MAX_MANIFEST_BYTES = 2**29

# The names of field types in messages.
_KINDS = {dict: "an object", list: "a list", str: "text", int: "a count"}


@contextmanager
def open_file(checkpoint: Checkpoint, file: str) -> Iterator[io.BufferedIOBase]:
    """Open a file for reading. An OSError, while opening or reading, becomes Damaged or Unreadable."""
    with as_invalid(checkpoint, file), checkpoint.open(file) as stream:
        yield stream


@contextmanager
def as_invalid(checkpoint: Checkpoint, file: str) -> Iterator[None]:
    """Turn an OSError in this block, which reads `file`, into Missing, Damaged, Unreadable or Forbidden."""
    try:
        yield
    except FileNotFoundError:
        raise Missing(checkpoint, file, "missing") from None
    except OSError as error:
        # EINVAL: not a regular file. After any other error, the bytes may still be intact.
        kind = Forbidden if error.errno in NO_RIGHT else Damaged if error.errno == errno.EINVAL else Unreadable
        raise kind(checkpoint, file, f"cannot be read: {error.strerror or error}") from None


def read_manifest(checkpoint: Checkpoint) -> Manifest:
    """Read and check the manifest of a checkpoint. Raise InvalidCheckpoint."""
    with open_file(checkpoint, MANIFEST) as stream:
        data = stream.read(_MAX_MANIFEST_BYTES + 1)

    manifest = decode_manifest(data, checkpoint)

    # A copy under the name of a later step would be taken for the newest checkpoint. A copy under a name that is not
    # the name of a step does no harm.
    named_step = step_in(checkpoint.name)
    if named_step is not None and named_step != manifest.step:
        raise Damaged(checkpoint, MANIFEST, f"belongs to step {manifest.step:,}: the folder was renamed, or is a copy")

    return manifest


def decode_manifest(data: bytes, checkpoint: Checkpoint) -> Manifest:
    """Parse `data`, the contents of `manifest.json`. Raise WrongFormat, or Damaged if they are invalid in any way."""
    if len(data) > _MAX_MANIFEST_BYTES:
        raise Damaged(checkpoint, MANIFEST, f"more than {_MAX_MANIFEST_BYTES:,} bytes")

    try:
        # A large manifest becomes millions of objects, none of them garbage. The collector would go through all of them
        # again and again, which takes as long as the rest.
        with garbage.paused():
            return _parse(data, checkpoint)
    except (ValueError, RecursionError) as error:
        raise Damaged(checkpoint, MANIFEST, str(error)[:300] or "nested too deep") from None


def check_written(manifest: Manifest, size: int, checkpoint: Checkpoint) -> None:
    """Check a manifest before it is written with `size` bytes, so that it can be read again. Raise Damaged.

    Its objects are checked as `decode_manifest` checks them. To decode it would take several times as long as to encode
    it, and training would wait, because threads share the interpreter.
    """
    try:
        require(size <= _MAX_MANIFEST_BYTES, f"more than {_MAX_MANIFEST_BYTES:,} bytes")
        _check_manifest(manifest)
    except (ValueError, RecursionError) as error:
        raise Damaged(checkpoint, MANIFEST, str(error)[:300] or "nested too deep") from None


def _parse(data: bytes, checkpoint: Checkpoint) -> Manifest:
    """Parse a manifest, and check its version, its digest and its fields."""
    outer = parse_json(data)

    # Another format may have other fields, so look at the version first. `type`, not `isinstance`: True is not 1 here.
    version = outer.get("format") if isinstance(outer, dict) else None
    if type(version) is int and version != FORMAT:
        age = "an older" if version < FORMAT else "a newer"
        why = f"format {str(version)[:40]}, of {age} version of Lockstep; this version reads format {FORMAT}"
        raise WrongFormat(checkpoint, MANIFEST, why)

    check_fields(outer, "the manifest", format=int, digest=object, content=object)

    digest = xxhash.xxh3_128(canonical(outer["content"])).hexdigest()
    require(outer["digest"] == digest, "the digest does not match the contents")

    return _parse_manifest(outer["content"], digest)


# ---- JSON ----


def parse_json(data: bytes) -> Any:
    """Parse strict JSON, without NaN and duplicate keys. Raise ValueError or RecursionError if it is invalid."""
    return json.loads(data, object_pairs_hook=_unique, parse_constant=_refuse_constant)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, or raise ValueError if it has a key twice: readers differ in which one counts."""
    unique = dict(pairs)
    require(len(unique) == len(pairs), "a key occurs twice")
    return unique


def _refuse_constant(name: str) -> None:
    """Raise ValueError: Python's JSON would accept NaN and Infinity."""
    raise ValueError(f"{name} is not JSON")


# ---- checks of all fields ----
#
# A manifest of a large model has millions of fields, so the checks of pieces build a message only if they fail.


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def check_fields(value: Any, what: str, **kinds: type) -> dict[str, Any]:
    """Return the JSON object `value` if it has exactly these keys, with values of these types (`object`: any type)."""
    fields = _check_type(value, dict, what)
    if fields.keys() != kinds.keys():
        wrong_keys = sorted(fields.keys() ^ kinds.keys())
        raise ValueError(f"{what} has missing or unknown keys: {', '.join(wrong_keys)[:100]}")

    for key, kind in kinds.items():
        # Fast path: skip the call if the type matches. An int still needs its range check.
        if kind is not object and (kind is int or type(fields[key]) is not kind):
            _check_type(fields[key], kind, what, key)

    return fields


def check_counts(value: list[Any], what: str, field: str) -> tuple[int, ...]:
    """Return a shape or an offset, if torch could have it. `field` is its name, and `what` its owner, for the error."""
    if len(value) > 64:
        raise ValueError(f"{what}: {field} has too many dimensions")

    # `type`, not `isinstance`: True must not pass as 1.
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) > _MAX_BYTES):
        raise ValueError(f"{what}: {field} is not a list of counts")

    return tuple(value)


def _check_type(value: Any, kind: type, what: str, field: str = "") -> Any:
    """Return the value if it is of this type, and if a count is within bounds. Raise ValueError."""
    # `type`, not `isinstance`: True must not pass as 1.
    if type(value) is not kind or (kind is int and not 0 <= value <= _MAX_BYTES):
        where = f"{what}: {field}" if field else what
        raise ValueError(f"{where} is not {_KINDS[kind]}")

    return value


def _parse_manifest(content: Any, digest: str) -> Manifest:
    """Check all fields of a manifest's content, and return it as a Manifest."""
    fields = check_fields(
        content, "content", step=int, time=object, lockstep=str, files=list, tensors=dict, aliases=dict, values=dict
    )

    # In seconds since 1970: 1e11 is in the year 5138.
    time = fields["time"]
    require(type(time) in (int, float) and 0 <= time < 1e11, "time is not a number of seconds since 1970")

    files = tuple(File(**check_fields(item, "a file", name=str, size=int, digest=str)) for item in fields["files"])
    tensors = {name: _parse_tensor(name, item) for name, item in fields["tensors"].items()}
    manifest = Manifest(
        fields["step"], float(time), fields["lockstep"], files, tensors, fields["aliases"], fields["values"], digest
    )

    _check_manifest(manifest)
    return manifest


def _check_manifest(manifest: Manifest) -> None:
    """Check the values of a manifest's fields, whose types are right. Raise ValueError."""
    for file in manifest.files:
        _check_file(file)

    names = {file.name for file in manifest.files}
    require(len(names) == len(manifest.files), "a file is listed twice")

    for name, entry in manifest.tensors.items():
        _check_tensor(f"tensor {name!r}", entry, names)

    # The target of an alias is a tensor, not another alias.
    for name, target in manifest.aliases.items():
        require(
            isinstance(target, str) and target in manifest.tensors and name not in manifest.tensors,
            f"the alias {name!r} has no valid target",
        )

    check_floats(manifest.values)


def check_floats(value: Any) -> None:
    """Check the numbers in `values` that strict JSON lacks. Only the objects that saved the rest can check that."""
    match value:
        case {"$float": text}:
            require(isinstance(text, str) and text in FLOATS, f"$float = {str(text)[:40]!r} is not a number")

        case dict():
            for item in value.values():
                check_floats(item)

        case list():
            for item in value:
                check_floats(item)


def _check_file(file: File) -> None:
    # A name such as "../x" would point outside the checkpoint: allow no separator, and no dot at the beginning.
    plain = re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}", file.name) and file.name != MANIFEST
    require(bool(plain), f"{file.name[:60]!r} is not a plain file name")


def _parse_tensor(name: str, item: Any) -> TensorEntry:
    """Return the entry of a tensor, if its fields have the right types."""
    what = f"tensor {name!r}"
    fields = check_fields(item, what, dtype=str, shape=list, pieces=list)
    shape = check_counts(fields["shape"], what, "shape")
    what_piece = f"a piece of {what}"
    return TensorEntry(fields["dtype"], shape, tuple(_parse_piece(piece, what_piece) for piece in fields["pieces"]))


def _parse_piece(item: Any, what: str) -> Piece:
    """Return a piece of a tensor, if its fields have the right types."""
    fields = check_fields(item, what, file=str, offset=list, shape=list)
    offset = check_counts(fields["offset"], what, "offset")
    return Piece(fields["file"], offset, check_counts(fields["shape"], what, "shape"))


def _check_tensor(what: str, entry: TensorEntry, files: set[str]) -> None:
    """Check the entry of a tensor: its dtype, its size, and that its pieces cover it. `files` are those listed."""
    dtype, shape, pieces = entry.dtype, entry.shape, entry.pieces
    require(dtype in DTYPES, f"{what} has the unknown dtype {dtype[:40]!r}")

    # Count a dimension of 0 as 1: torch multiplies the other dimensions too, and could overflow.
    require(byte_count((max(length, 1) for length in shape), dtype) <= _MAX_BYTES, f"{what} would be too large")

    what_piece = f"a piece of {what}"
    for piece in pieces:
        _check_piece(what_piece, piece, shape, files)

    # Each tensor of a file is used by one piece only. Otherwise a small file could expand to a large tensor.
    require(len({piece.file for piece in pieces}) == len(pieces), f"{what} has two pieces in the same file")
    _check_cover(what, shape, pieces)


def _check_piece(what: str, piece: Piece, full_shape: tuple[int, ...], files: set[str]) -> None:
    """Check a piece of a tensor, which has the shape `full_shape`."""
    file, offset, shape = piece

    # A file that is not listed has no digest.
    if file not in files:
        raise ValueError(f"{what} is in {file[:60]!r}, which is not listed")

    if not len(offset) == len(shape) == len(full_shape):
        raise ValueError(f"{what} has a different number of dimensions")

    for start, length, limit in zip(offset, shape, full_shape, strict=True):
        if start + length > limit:
            raise ValueError(f"{what} exceeds the tensor's shape")


def _check_cover(what: str, shape: tuple[int, ...], pieces: tuple[Piece, ...]) -> None:
    """Check that every element is in exactly one piece: the sizes add up, and the pieces are a grid."""
    # Empty pieces overlap nothing.
    nonempty = [piece for piece in pieces if 0 not in piece.shape]
    if sum(math.prod(piece.shape) for piece in nonempty) != math.prod(shape):
        raise ValueError(f"the pieces of {what} do not add up to the full tensor")

    # However a tensor is sharded, its shards are the cells of a grid.
    if nonempty and not _is_grid(shape, nonempty):
        raise ValueError(f"the pieces of {what} are not a grid")


def _is_grid(shape: tuple[int, ...], pieces: list[Piece]) -> bool:
    """Return whether the pieces are all cells of a grid, each once: then they cover the tensor without overlaps."""
    cells = 1
    for dim, length in enumerate(shape):
        # The intervals of one dimension, in order, must lie end to end.
        end = 0
        intervals = sorted({(piece.offset[dim], piece.shape[dim]) for piece in pieces})
        for start, size in intervals:
            if start != end:
                return False

            end = start + size

        if end != length:
            return False

        cells *= len(intervals)

    return cells == len(pieces) == len({piece.offset for piece in pieces})
