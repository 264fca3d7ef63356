"""Files that several processes read and write.

Other processes may be killed at any moment, and a file may have been put there by anyone. So a file appears complete or
not at all, only regular files are read, and a file that cannot be read may count as empty.
"""

from __future__ import annotations

import errno
import glob
import io
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# The largest file, in bytes, that is read as a whole. Logs and metrics of long runs stay far below it.
LARGEST = 2**30

# How old a temporary file must be, in seconds, before it counts as left by a process that was killed. A process that
# still writes to it changes its time again and again.
LEFTOVER_S = 60.0


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, then rename it to `path`, so that no process reads half a file.

    After an error the temporary file is removed. Several writers may replace the same file at once: each writes a
    temporary file of its own, and the last rename counts.
    """
    # Not the number of the process, which its threads share, and which a process of another machine may have as well.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:  # Ctrl-C as well: no temporary file may stay behind
        temporary.unlink(missing_ok=True)
        raise


def delete_old_temporaries(path: Path) -> None:
    """Delete the temporary files of writers of `path` that were killed (`replacing`)."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        # Another process may delete it at this moment, or may still write to it.
        with suppress(OSError):
            if time.time() - temporary.stat().st_mtime > LEFTOVER_S:
                temporary.unlink()


def write(path: Path, text: str) -> None:
    """Write a text file, in UTF-8, that appears complete or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def create_once(path: Path, data: bytes, mode: int = 0o666) -> bool:
    """Create a file that appears complete or not at all. Return False if the path exists already.

    If several processes try at once, on several machines too, only one of them creates it: a link is made once.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)

        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)

    return True


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file for reading. Raise OSError for a pipe or a device, which might wait, or go on, forever."""
    # O_NONBLOCK: opening a pipe must not wait for a writer. For a regular file it means nothing.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))

    return os.fdopen(fd, "rb")


def read_bytes(path: Path, most: int = LARGEST) -> bytes:
    """Return the contents of a regular file. Raise OSError if it is anything else, or larger than `most`."""
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
