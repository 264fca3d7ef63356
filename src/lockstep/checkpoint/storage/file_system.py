"""Checkpoints in a folder of a file system, which all ranks share."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lockstep.checkpoint.storage.protocol import PAGE, NotDurable
from lockstep.launch.folder.checkpoint_names import LATEST, OWNER
from lockstep.launch.records import open_regular, read_bytes, replacing


class FileSystemStorage:
    """Keeps checkpoints in a folder. They survive a power cut: contents are written to the disk before names.

    Keys are relative paths. A rename of a folder is the commit of a checkpoint: before it, the folder has another name,
    and no reader takes it for a checkpoint.
    """

    def __init__(self, root: Path):
        self.root = Path(root)
        self.address = str(self.root)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileSystemStorage) and self.root.resolve() == other.root.resolve()

    def __hash__(self) -> int:
        return hash(self.root.resolve())

    def folders(self) -> list[str]:
        # One scandir, because a stat call for each of 200,000 entries would take a second.
        if not self.root.is_dir():
            return []

        with os.scandir(self.root) as entries:
            return [entry.name for entry in entries if entry.is_dir()]

    def open(self, key: str) -> io.BufferedIOBase:
        return open_regular(self.root / key)

    def write(self, key: str, chunks: Iterable[memoryview]) -> None:
        path = self.root / key
        write_file(path, chunks)
        sync_folder(path.parent)

    def replace(self, key: str, data: bytes) -> None:
        # Without an fsync, which takes a millisecond or more: these files are messages to running processes, and a
        # power cut ends those as well. The next start claims the storage anew, and lists the checkpoints themselves.
        with replacing(self.root / key, str(os.getpid())) as temporary, _create(temporary) as file:
            _write_all(file.fileno(), memoryview(data), 0)

    def rename(self, folder: str, to: str) -> None:
        os.rename(self.root / folder, self.root / to)
        try:
            sync_folder(self.root)
        except OSError as error:
            raise NotDurable(error.errno, error.strerror, str(self.root)) from error

    def delete(self, key: str) -> None:
        path = self.root / key
        if path.is_dir():
            # Delete as much as possible before raising an error.
            shutil.rmtree(path, ignore_errors=True)
            if path.exists():
                raise OSError(errno.ENOTEMPTY, "could not be deleted", str(path))
        else:
            path.unlink(missing_ok=True)

            # Delete the folder with its last file. While it has other files, `rmdir` fails.
            if path.parent != self.root:
                with suppress(OSError):
                    path.parent.rmdir()

    def claim(self, token: str) -> None:
        # Delete temporary files of `replace` whose writer was killed. After a claim, no other writer needs them.
        for temporary in (*self.root.glob(f".{LATEST}.*"), *self.root.glob(f".{OWNER}.*")):
            temporary.unlink(missing_ok=True)

        self.replace(OWNER, token.encode())

    def owner(self) -> str | None:
        # Before the first claim there is no such file. Any other error must not look as if there were no owner.
        with suppress(FileNotFoundError):
            return read_bytes(self.root / OWNER, most=1000).decode(errors="replace").strip()

        return None

    def free_bytes(self) -> int:
        # The folder may not exist yet. Its nearest existing parent is on the same disk.
        folders = (self.root, *self.root.absolute().parents)
        return shutil.disk_usage(next(folder for folder in folders if folder.exists())).free


def _create(path: Path) -> io.FileIO:
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
    with _create(path) as file:
        for chunk in chunks:
            # Small chunks are faster through the page cache.
            suitable = len(chunk) >= 1 << 20 and not len(chunk) % PAGE and not position % PAGE
            if not (direct and suitable and _write_directly(file.fileno(), chunk, position)):
                # After a file system has refused one direct write, do not try again.
                direct = direct and not suitable
                _write_all(file.fileno(), chunk, position)

            position += len(chunk)

        os.fsync(file.fileno())


def _write_all(handle: int, data: memoryview, position: int) -> None:
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
        _write_all(handle, data, position)
    except OSError as error:
        # These errors mean that direct writes are not supported. Others, such as a full disk, are real failures.
        if error.errno not in (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP):
            raise

        return False
    finally:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags)

    return True
