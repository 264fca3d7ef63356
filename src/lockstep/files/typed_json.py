"""Files and JSON that the processes of a job exchange.

Other processes may be killed at any moment, and other machines may send anything. So a file appears complete or not at
all, a file that cannot be read counts as empty, and JSON is checked field by field before it becomes an object.
"""

from __future__ import annotations

import errno
import io
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

# The largest file, in bytes, that is read as a whole. Logs and metrics of long runs stay far below it.
LARGEST = 2**30

# How deep dicts and lists may be nested.
DEEPEST = 50


@contextmanager
def replacing(path: Path, suffix: str = "tmp") -> Iterator[Path]:
    """Yield a draft to write to, then rename it to `path`, so that no process reads half a file.

    An error removes the draft.
    """
    # Processes that may write the same file at once need different suffixes.
    draft = path.with_name(f".{path.name}.{suffix}")
    try:
        # A draft may be left by a process that was killed, or be a link, which must not be written through.
        draft.unlink(missing_ok=True)
        yield draft
        os.replace(draft, path)
    except BaseException:  # Ctrl-C as well: no draft may stay behind
        draft.unlink(missing_ok=True)
        raise


def write(path: Path, text: str) -> None:
    """Write a text file that appears complete or not at all."""
    # Several ranks may write at once.
    with replacing(path, f"{secrets.token_hex(4)}.tmp") as draft:
        draft.write_text(text)


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file for reading. Raises OSError for a pipe or a device, which might wait, or go on, for ever."""
    # O_NONBLOCK: opening a pipe must not wait for a writer. For a regular file it means nothing.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))

    return os.fdopen(fd, "rb")


def read_bytes(path: Path, most: int = LARGEST) -> bytes:
    """Return the contents of a regular file. Raises OSError if it is anything else, or larger than `most`."""
    with open_regular(path) as file:
        data = file.read(most + 1)

    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))

    return data


def read(path: Path, start: int = 0, most: int = LARGEST) -> str:
    """Return what a file holds from byte `start` on, its last `most` bytes at most; "" if it cannot be read."""
    try:
        with open_regular(path) as file:
            # Files of /proc have contents, but no size.
            file.seek(max(start, os.fstat(file.fileno()).st_size - most))
            return file.read(most).decode(errors="replace")
    except OSError:
        return ""


def load_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError for invalid JSON, and for JSON that is nested too deep to walk through."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None

    return not_too_deep(value)


def not_too_deep(value: Any) -> Any:
    """Return the value. Raises ValueError if its dicts and lists are nested deeper than DEEPEST."""
    # Level by level, without recursion, which deep nesting would exhaust.
    level = [value]

    for _ in range(DEEPEST):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item

        level = inner
        if not level:
            return value

    raise ValueError("nested too deep")


def parse(kind: Any, value: Any) -> Any:
    """Return decoded JSON as a `kind`.

    A kind is a dataclass, a list, a dict, a plain type, a `Literal` of plain values, or one of these `| None`.
    Raises ValueError for a wrong type, an unknown field, or a missing field that has no default.
    """
    base, arguments, has_fields = _taken_apart(kind)
    if base is Literal:
        if value not in arguments:
            raise ValueError(f"{str(value)[:200]!r} instead of one of {arguments}")

        return value

    # `kind | None`: the only kind of union.
    if base is UnionType:
        return None if value is None else parse(arguments[0], value)

    if has_fields:
        types = _field_types(base)
        try:
            return kind(**{name: parse(types[name], field) for name, field in value.items()})
        except (AttributeError, KeyError, TypeError):
            # No object at all, an unknown field, or a missing one.
            raise ValueError(f"not a valid {kind.__name__}: {str(value)[:200]}") from None

    # Every int is a valid float. A bool is an int to Python, but not to us.
    accepted: Any = (int, float) if base is float else base
    if not isinstance(value, accepted) or isinstance(value, bool) != (base is bool):
        raise ValueError(f"{str(value)[:200]!r} instead of a value of type {base.__name__}")

    if base is list and arguments:
        return [parse(arguments[0], item) for item in value]

    # JSON has only text for keys.
    if base is dict and arguments:
        return {arguments[0](key): parse(arguments[1], item) for key, item in value.items()}

    return value


def encode_kind(value: Any) -> str:
    """Return a dataclass as JSON, with the name of its class under "kind": see `parse_kind`."""
    return json.dumps({"kind": type(value).__name__, **asdict(value)})


def parse_kind(kinds: Mapping[str, type], text: str | bytes) -> Any:
    """Return the dataclass that `encode_kind` has encoded; `kinds` are those that are accepted. Raises ValueError."""
    values: Any = json.loads(text)
    kind = kinds.get(str(values.pop("kind", None))) if isinstance(values, dict) else None
    if kind is None:
        raise ValueError("not a JSON object of a known kind")

    return parse(kind, values)


# Resolving annotations and taking types apart takes longer than parsing a message.
_field_types = cache(get_type_hints)


@cache
def _taken_apart(kind: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """Return the type without its arguments, its arguments, and whether it is a dataclass."""
    base = get_origin(kind) or kind
    return base, get_args(kind), is_dataclass(base)
