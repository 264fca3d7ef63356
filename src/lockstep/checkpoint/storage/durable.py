"""Files that survive a power cut, written in the chunks of a rank's tensors.

The files of `lockstep.files` appear whole to other processes, but a power cut may undo them.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# The number of bytes that are written or read at a time.
CHUNK = 16 << 20

# Direct writes (O_DIRECT) begin and end at multiples of this, in memory and in the file. So do the chunks of a rank's
# file, except its header and the end of its last chunk: `snapshot` aligns the buffer, `rank_file.arrange` pads the
# header, and `split` cuts the data.
PAGE = 4096


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


def sync_names(path: Path) -> None:
    """Make the name of a file or folder durable, and the names of the folders above it on its disk: any may be new.

    Raise OSError if the name itself cannot be made durable.
    """
    # Climb with "..": a relative path may begin below a folder that this user may not enter. Ask the folder for its
    # disk, because on overlayfs a file may seem to be on another disk than its folder.
    folder = path / ".." if path.is_dir() else path.parent
    sync_folder(folder)
    here = folder.stat()

    # The folders above were not written to. An error there, of a file server for example, must not stop a run.
    with suppress(OSError):
        while True:
            folder = folder / ".."
            below, here = here, folder.stat()
            if here.st_dev != below.st_dev or here.st_ino == below.st_ino:
                break  # another disk, or the root

            # This user may not read some folders, such as /home.
            with suppress(OSError):
                sync_folder(folder)


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
