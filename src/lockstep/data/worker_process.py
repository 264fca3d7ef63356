"""Set-up of a DataLoader worker: it ends with its rank, ignores preemption signals, and has its own file positions.

torch forks workers from the rank, so they inherit its signal handlers and open files.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from lockstep.data.torch_private import shut_down_workers, worker_processes
from lockstep.errors import UserError
from lockstep.runtime.parent_death import die_with_parent, signal_on_parents_death
from lockstep.runtime.preemption import WORKER_NAME

# After SIGTERM a worker process ends by itself, unless its rank ends it before.
WORKER_GRACE_S = 120.0

DESCRIPTORS = "/proc/self/fd"  # Linux only: opening an entry opens its file again


class LoaderBatches(Iterator[Any]):
    """The batches of a DataLoader, whose worker processes start now and end in `close`.

    Dropping the iterator is not enough: the traceback of an error may hold it until the process exits. Python then
    sends SIGTERM to the workers, which survive it for WORKER_GRACE_S, and waits for them.
    """

    def __init__(self, loader: DataLoader):
        before = set(multiprocessing.active_children())
        try:
            self._batches = iter(loader)
            self._workers = worker_processes(loader, self._batches)

            # A preemption finds them by this name.
            for process in self._workers:
                process.name = WORKER_NAME
        except BaseException:
            # A preemption, for example, may come when some have been started and none has its name yet.
            for process in set(multiprocessing.active_children()) - before:
                process.kill()

            raise

    def __next__(self) -> Any:
        """Return the next batch, or raise the error that a worker process sent instead of it."""
        batch = next(self._batches)
        if isinstance(batch, UserError):
            raise batch
        return batch

    def close(self) -> None:
        """End the worker processes. A second call does nothing."""
        if not self._workers:
            return

        # This asks them to end, and waits. One that is still alive after that is stuck in the user's code.
        shut_down_workers(self._batches)
        for process in self._workers:
            if process.is_alive():
                process.kill()

        self._workers = []


def start_worker(files: dict[int, int], worker: int) -> None:
    """Set up a worker process. `files` is the result of `open_files` in the rank, before the fork."""
    # First of all: a rank that dies from here on takes this process with it.
    _die_with_rank()
    outlive_signals()
    reopen(files)


def _die_with_rank() -> None:
    """Let the kernel kill this process when the rank dies, even if the launcher was killed too."""
    rank = multiprocessing.parent_process()

    # Otherwise the parent may be a fork server, which ends with the rank as well.
    if rank is not None and rank.pid is not None and multiprocessing.get_start_method() == "fork":
        die_with_parent(rank.pid)
    else:
        signal_on_parents_death(signal.SIGKILL)


def open_files() -> dict[int, int]:
    """Return the position in each regular file that is open for reading, by file descriptor."""
    offsets: dict[int, int] = {}
    folder = Path(DESCRIPTORS)
    if not folder.is_dir():
        return offsets

    for descriptor in [int(entry.name) for entry in folder.iterdir()]:
        # The descriptor of the directory listing itself is closed by now.
        with contextlib.suppress(OSError):
            readable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
            if readable and stat.S_ISREG(os.fstat(descriptor).st_mode):
                offsets[descriptor] = os.lseek(descriptor, 0, os.SEEK_CUR)

    return offsets


def reopen(files: dict[int, int]) -> None:
    """Give this process its own position in each file: forked processes share one, and each read would move it.

    The descriptors keep their numbers, so file objects and libraries that hold them still work.
    """
    for descriptor, offset in files.items():
        # A file that cannot be opened again stays shared. The comparison of the first micro-batch detects problems.
        with contextlib.suppress(OSError):
            # Other flags are dropped: a temporary file's flags would create a new file, or refuse to follow a link.
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND)
            own = os.open(f"{DESCRIPTORS}/{descriptor}", flags)
            os.lseek(own, offset, os.SEEK_SET)
            os.dup2(own, descriptor, inheritable=False)
            os.close(own)


def outlive_signals() -> None:
    """Make a worker process survive the signals of a preemption.

    Schedulers signal all processes of a job, but a rank needs its workers until it has saved. Workers end with the
    rank, or WORKER_GRACE_S after a SIGTERM.
    """
    # Ctrl-C reaches the whole process group; SIGUSR1 is Slurm's warning.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)

    signal.signal(signal.SIGTERM, _exit_later)


def _exit_later(number: int, frame: Any) -> None:
    timer = threading.Timer(WORKER_GRACE_S, os._exit, (0,))
    timer.daemon = True
    timer.start()
