"""Files that survive a power cut, written in the chunks of a rank's tensors; and the store that keeps them (file://)."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lockstep.files import open_regular

# The number of bytes that are written or read at a time.
CHUNK = 16 << 20

# Direct writes (O_DIRECT) begin and end at multiples of this, in memory and in the file. So do the chunks of a rank's
# file, except its header and the end of its last chunk: `snapshot` aligns the buffer, `format.arrange` pads the header,
# and `split` cuts the data.
PAGE = 4096


class LocalFiles:
    """Keeps tensors in a folder of a file system that all ranks share: file:///FOLDER."""

    def write(self, url: str, chunks: Iterable[memoryview]) -> None:
        path = _path_of(url)
        write_file(path, chunks)

        # The folders of the step, of the run and of the store may be new.
        for folder in path.parents[:3]:
            sync_folder(folder)

    def open(self, url: str) -> io.BufferedIOBase:
        return open_regular(_path_of(url))

    def delete(self, url: str) -> None:
        path = _path_of(url)
        path.unlink(missing_ok=True)

        # Delete the folder of the step with its last file. While it has other files, `rmdir` fails.
        with suppress(OSError):
            path.parent.rmdir()

    def free_bytes(self, url: str) -> int:
        return free_bytes(_path_of(url))


def _path_of(url: str) -> Path:
    return Path(url.partition("://")[2])


def free_bytes(folder: Path) -> int:
    """Return how many bytes can still be written below a folder, which may not exist yet."""
    # Its nearest existing parent is on the same disk.
    folders = (folder, *folder.absolute().parents)
    return shutil.disk_usage(next(folder for folder in folders if folder.exists())).free


def split(data: memoryview) -> list[memoryview]:
    """Split `data` for `CheckpointStorage.write`: every chunk but the last is a whole number of pages."""
    # An aborted save ends between two chunks.
    chunks = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]

    # An incomplete page becomes a separate chunk, since a chunk with one cannot be written directly.
    rest = len(data) % PAGE
    if chunks and rest and len(chunks[-1]) > PAGE:
        chunks[-1:] = [chunks[-1][:-rest], chunks[-1][-rest:]]

    return chunks


def create_file(path: Path) -> io.FileIO:
    """Create a file and its folder. Retry if another rank deletes the folder while it is still empty."""
    attempts_left = 10

    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return open(path, "wb", buffering=0)
        except FileNotFoundError:
            attempts_left -= 1
            if not attempts_left:
                raise


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable, because an fsync of a file does not cover its name."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems and FUSE refuse an fsync of any folder with these errors. They order their names
        # themselves, and there is no other way to ask for more.
        if error.errno not in (errno.EINVAL, errno.EBADF):
            raise
    finally:
        os.close(handle)


def write_file(path: Path, chunks: Iterable[memoryview]) -> None:
    """Write a new file. Its contents are durable when this returns, its name is not.

    Large aligned chunks are written with O_DIRECT. Copying them to the page cache first would keep a core busy, which
    training needs, and fsync would still have to wait for the disk.
    """
    direct = hasattr(os, "O_DIRECT")
    position = 0
    with create_file(path) as file:
        for chunk in chunks:
            # Small chunks are faster through the page cache.
            suitable = len(chunk) >= 1 << 20 and not len(chunk) % PAGE and not position % PAGE
            if not (direct and suitable and _write_directly(file.fileno(), chunk, position)):
                # After a file system has refused one direct write, do not try again.
                direct = direct and not suitable
                write_all(file.fileno(), chunk, position)

            position += len(chunk)

        os.fsync(file.fileno())


def write_all(handle: int, data: memoryview, position: int = 0) -> None:
    # pwrite may write less than requested.
    while data:
        count = os.pwrite(handle, data, position)
        data = data[count:]
        position += count


def _write_directly(handle: int, data: memoryview, position: int) -> bool:
    """Write past the page cache. Return False if this file system or this memory does not allow it."""
    # The flag applies to the open file, so it is set for this chunk only.
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | os.O_DIRECT)
        write_all(handle, data, position)
    except OSError as error:
        # These errors mean that direct writes are not supported. Others, such as a full disk, are real failures.
        if error.errno not in (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP):
            raise

        return False
    finally:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags)

    return True
