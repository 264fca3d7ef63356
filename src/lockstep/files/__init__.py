"""Files that several processes read and write.

Other processes may be killed at any moment, and a file may have been put there by anyone. So a file appears complete or
not at all, only regular files are read, and a file that cannot be read may count as empty.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The largest file, in bytes, that is read as a whole. Logs and metrics of long runs stay far below it.
LARGEST = 2**30


@contextmanager
def replacing(path: Path, suffix: str = "tmp") -> Iterator[Path]:
    """Yield a temporary path to write to, then rename it to `path`, so that no process reads half a file.

    After an error the temporary file is removed.
    """
    # Processes that may write the same file at once need different suffixes.
    temporary = path.with_name(f".{path.name}.{suffix}")
    try:
        # A process that was killed may have left such a file, or it is a link, which must not be written through.
        temporary.unlink(missing_ok=True)
        yield temporary
        os.replace(temporary, path)
    except BaseException:  # Ctrl-C as well: no temporary file may stay behind
        temporary.unlink(missing_ok=True)
        raise


def write(path: Path, text: str) -> None:
    """Write a text file that appears complete or not at all."""
    # Several ranks may write at once.
    with replacing(path, f"{secrets.token_hex(4)}.tmp") as temporary:
        temporary.write_text(text)


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
