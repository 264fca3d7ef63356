"""JSON lines on disk: `metrics.jsonl` and `events.jsonl` of a run.

One record is one `write` to a file opened for appending. A reader therefore sees whole lines, and a process that dies
loses nothing that it wrote. (A machine that loses power may: an fsync would cost milliseconds per record.)

JSON has no NaN and no infinity. Such a number is written as `null`, and the record gains a key `_nonfinite` that says
what it was, by dotted path: `{"loss": null, "_nonfinite": {"loss": "nan"}}`. Any JSON reader can read that, and
`read_jsonl` puts the numbers back.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from lockstep.errors import UserError
from lockstep.files import read_bytes
from lockstep.files.typed_json import load_json

NONFINITE = "_nonfinite"

# How long a line must stay without its end before it counts as left by a process that died.
TORN_S = 0.05

CHUNK = 65536  # bytes that are read at a time, from the end of a file, to find its last line


class JsonlSink:
    """Appends records to `path`. The file is created if necessary; its folder must exist."""

    def __init__(self, path: str | os.PathLike[str]):
        # O_APPEND: the launcher and rank 0 may write whole lines to the same file.
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._file = os.fdopen(fd, "ab", buffering=0)
        _truncate_partial_line(fd)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record. Objects with `.item()` (numpy scalars) become numbers, other objects text."""
        line = (_encode(record) + "\n").encode()
        try:
            # A signal or a disk that fills up may split a write.
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            # Leave whole lines behind, so that a later write is not glued to half of this one.
            _truncate_partial_line(self._file.fileno())
            raise

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return all whole records of a file, with non-finite numbers put back. A truncated last line is left out."""
    *lines, tail = read_bytes(Path(path)).split(b"\n")

    # Blank lines are skipped. Anything else in the middle of a file must be a record.
    records = []

    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is not None:
            records.append(record)
        elif line.strip():
            raise UserError(
                f"{path}: line {number} is not a JSON object",
                f"it begins with {line[:60].decode(errors='replace')!r}",
                f"look at it, and remove it: sed -i {number}d {shlex.quote(os.fspath(path))}",
            )

    # A last line without a newline may still be complete.
    record = _parse(tail)
    return records if record is None else [*records, record]


def _plain(value: object) -> object:
    """Return what JSON can hold of an object that it does not know: a number, or its text."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)


_strict = json.JSONEncoder(allow_nan=False, separators=(", ", ": "), default=_plain)


def _encode(record: Mapping[str, Any]) -> str:
    """Return a record as one line of JSON."""
    # Only a record with a non-finite number pays for the search for it.
    try:
        return _strict.encode(record)
    except ValueError:
        marks: dict[str, str] = {}

        def mark(path: str, value: Any) -> Any:
            # A numpy scalar may be non-finite as well.
            if value is not None and not isinstance(value, str | int | float):
                value = _plain(value)

            if isinstance(value, float) and not math.isfinite(value):
                marks[path] = repr(float(value))
                return None

            return value

        return _strict.encode({**_mapped(record, mark), NONFINITE: marks})


def _mapped(value: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return a copy of nested dicts and lists, with every value replaced by `change(dotted path, value)`."""
    if isinstance(value, dict):
        return {key: _mapped(item, change, f"{path}.{key}") for key, item in value.items()}

    if isinstance(value, list | tuple):
        return [_mapped(item, change, f"{path}.{index}") for index, item in enumerate(value)]

    return change(path.removeprefix("."), value)


def _truncate_partial_line(fd: int) -> None:
    """Make the file end with a whole line, so that the next record starts a new one.

    A partial record of an earlier process is removed; readers skip it anyway.
    """
    size = start = os.fstat(fd).st_size
    tail = b""

    # Read backwards, in chunks: a long run has a large file, whose last line is short.
    while start > 0 and b"\n" not in tail:
        length = min(start, CHUNK)
        start -= length
        tail = os.pread(fd, length, start) + tail

    # Everything after the last newline.
    torn = tail.rpartition(b"\n")[2]
    if _parse(torn) is not None:
        # Only the newline is missing.
        os.write(fd, b"\n")
    elif torn:
        # Another process may be writing this line right now. Only a line that stays torn is removed.
        time.sleep(TORN_S)
        if os.fstat(fd).st_size == size:
            os.ftruncate(fd, size - len(torn))
        else:
            _truncate_partial_line(fd)


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line, None if it is not a JSON object."""
    try:
        record = load_json(line)
    except ValueError:
        return None

    if not isinstance(record, dict):
        return None

    # Most records have no non-finite number.
    marks = record.pop(NONFINITE, None)
    if not isinstance(marks, dict):
        return record

    def put_back(path: str, value: Any) -> Any:
        return float(marks[path]) if value is None and path in marks else value

    return _mapped(record, put_back)
