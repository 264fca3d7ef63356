"""The locks of a run folder: one run, and one launcher, at a time.

.lock        locked by rank 0
.launcher    locked by the launcher of a job for as long as it lives
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any

from lockstep import files
from lockstep.errors import UserError, printable
from lockstep.run_folder.names import LAUNCHER_LOCK, LOCK
from lockstep.run_folder.run_dir import not_writable, prepare

# How long a launcher waits for the end of another one, which may just have been killed.
LAUNCHER_WAIT_S = 10.0

# After this long, the wait for a lock is announced.
SILENT_S = 1.0

# The errors of a file system without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def lock(run: Path, timeout: float = 10.0) -> Any:
    """Lock the folder for one run at a time. Return an open file, which the caller keeps open.

    The lock belongs to this process and is released however the process ends. Return None on a file system without
    locks, where only the owner's token guards the checkpoints.
    """
    file = _hold_file(run / LOCK, timeout, "a process that trains there")
    if file is None:
        return None

    # A process that does not get the lock names this process in its message.
    file.truncate(0)
    file.write(f"{os.uname().nodename} {os.getpid()}\n")
    file.flush()

    return file


def _hold_file(path: Path, timeout: float, holder: str) -> IO[str] | None:
    """Lock a file. Return None on a file system without locks; raise a UserError if another `holder` keeps the lock."""
    file = _open_lock(path)
    acquired = _acquire(file, min(timeout, SILENT_S))
    if acquired is False and timeout > SILENT_S:
        # Without this line a user would wait before an empty screen.
        in_use = f"run_dir={path.parent} is in use by {holder} right now{_name_in(path)}"
        print(printable(f"lockstep: {in_use}: waiting up to {timeout:.0f} s for its end"), file=sys.stderr, flush=True)
        acquired = _acquire(file, timeout - SILENT_S)

    if acquired and _is_at(file, path):
        return file

    file.close()
    if acquired is False:
        found = f"{holder} right now{_name_in(path)}"
        fix = "wait for it, stop it, or set another run_dir"
        raise UserError(f"run_dir={path.parent} is in use by another run", found, fix)

    # A job's next coordinator may have removed the file while this process waited. Such a lock protects nothing.
    return _hold_file(path, timeout, holder) if acquired else None


def _name_in(path: Path) -> str:
    """Return the process that a lock names, in parentheses, for a message; "" if it names none."""
    host, _, pid = files.read(path, most=300).strip().partition(" ")
    return f" (process {pid} on {host})" if pid else ""


def _open_lock(path: Path) -> IO[str]:
    try:
        # If there is a link or a pipe in the place of this file, nothing must be written to it.
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", str(path))

        return os.fdopen(fd, "a+")
    except OSError as error:
        raise not_writable(path.parent, error) from error


def _is_at(file: IO[str], path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())

    return False


def _acquire(file: IO[str], timeout: float) -> bool | None:
    """Lock a file. Return False if another process keeps the lock, and None on a file system without locks."""
    # A process that was just killed releases its lock within moments, so try for a while.
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                return False

            time.sleep(0.1)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise

            return None


@contextmanager
def hold(run: Path) -> Iterator[None]:
    """Hold the folder for the launcher of one job, so that no other launcher starts ranks there.

    Ranks are restarted, the launcher stays: its lock says whether a request of `lockstep resize` would be carried out.
    On several machines only the coordinating node holds the folder; the others need no lock to join its job.
    """
    prepare(run)

    # This raises if a rank trains there, perhaps a rank without a launcher.
    held = lock(run)
    if held is not None:
        held.close()

    with _lock_for_launcher(run, LAUNCHER_WAIT_S):
        yield


def _lock_for_launcher(run: Path, timeout: float) -> AbstractContextManager[Any]:
    return _hold_file(run / LAUNCHER_LOCK, timeout, "a launcher whose job is there") or nullcontext()


def has_launcher(run: Path) -> bool:
    with _open_lock(run / LAUNCHER_LOCK) as file:
        return _acquire(file, timeout=0.0) is not True


def is_running(run: Path) -> bool | None:
    """Return whether a process holds the folder: a launcher or rank 0. None if that cannot be known.

    It writes nothing. A process that holds the folder itself must not call it: closing the file would release the lock.
    """
    held = [_is_held(run / name) for name in (LOCK, LAUNCHER_LOCK)]
    if True in held:
        return True

    return None if None in held else False


def _is_held(path: Path) -> bool | None:
    try:
        file = files.open_regular(path)
    except OSError as error:
        return False if isinstance(error, FileNotFoundError) else None

    # A shared lock needs no permission to write. It is given back at once.
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return None if error.errno in _NO_LOCKS else True

    return False


@contextmanager
def hold_idle(run: Path) -> Iterator[None]:
    """Hold a folder in which nothing runs, so that no run begins there meanwhile. Raise a UserError if one runs.

    Unlike `hold` it does not wait, and creates nothing but the two lock files.
    """
    with _lock_for_launcher(run, timeout=0.0), lock(run, timeout=0.0) or nullcontext():
        yield


def break_locks(run: Path) -> None:
    """Remove the locks for a job's next coordinator, because a suspended predecessor may hold them forever.

    The lock of a file that was removed protects nothing; the term file says which node may train there (`election.py`).
    """
    for name in (LOCK, LAUNCHER_LOCK):
        (run / name).unlink(missing_ok=True)
