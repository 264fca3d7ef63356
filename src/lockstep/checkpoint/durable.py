"""Files that are still there after a power cut: the contents reach the disk before the name does."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

CHUNK = 16 << 20  # bytes written at a time
PAGE = 4096  # where direct writes may begin and end, in memory and in the file
_WORTH_IT = 1 << 20  # bytes from which on a chunk is written directly


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: an fsync of a file does not cover its name."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, data: bytes) -> None:
    """A new file with these bytes, on the disk when this returns."""
    with open(path, "wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(data), 0)
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes, sync_name: bool = True) -> None:
    """Give `path` these bytes. Whoever looks sees the old contents or the new, never a part."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_file(draft, data)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    if sync_name:
        sync_folder(path.parent)


def cut(data: memoryview) -> list[memoryview]:
    """Chunks for `write_chunks`: two or more, of whole pages as far as that goes."""
    half = (len(data) + 1) // 2
    size = min(CHUNK, half - half % PAGE if half > PAGE else max(half, 1))
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    rest = len(data) % PAGE
    if chunks and rest and len(chunks[-1]) > PAGE:
        chunks[-1:] = [chunks[-1][:-rest], chunks[-1][-rest:]]
    return chunks


def write_chunks(path: Path, chunks: Iterator[memoryview], written: Callable[[memoryview], None]) -> None:
    """A new file from `chunks`; `written` sees each one after it was written. Durable when this returns.

    Large aligned chunks go from memory to the disk directly: no second copy in the page cache, which takes a core
    away from training for as long as it lasts, and nothing left to wait for in fsync.
    """
    position, direct = 0, hasattr(os, "O_DIRECT")
    with open(path, "wb", buffering=0) as file:
        for chunk in chunks:
            aligned = len(chunk) >= _WORTH_IT and not len(chunk) % PAGE and not position % PAGE
            if not (aligned and direct) or not (direct := _write_directly(file.fileno(), chunk, position)):
                _write_all(file.fileno(), chunk, position)
            written(chunk)
            position += len(chunk)
        os.fsync(file.fileno())


def free_bytes(folder: Path) -> int:
    """What a user may still write to the disk of `folder`, which need not exist yet."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    found = os.statvfs(existing)
    return found.f_bavail * found.f_frsize


def spoken(size: float) -> str:
    """1234567 -> "1.2 MB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _write_all(handle: int, data: memoryview, position: int) -> None:
    while data:
        count = os.pwrite(handle, data, position)
        data, position = data[count:], position + count


def _write_directly(handle: int, data: memoryview, position: int) -> bool:
    """Whether it could be done: not every file system, nor every memory, allows it."""
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | os.O_DIRECT)
        _write_all(handle, data, position)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP):
            raise
        return False
    finally:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags)
    return True
