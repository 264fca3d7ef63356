"""A worker process of a rank: it ends with its rank, outlives a preemption's signals, and reads files on its own.

Workers are torch's, forked from the rank by a DataLoader, so they begin with the rank's signals and open files.
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

from lockstep.runtime.parent_death import die_with_parent, signal_on_parents_death
from lockstep.runtime.preemption import WORKER_NAME

# After SIGTERM a worker process ends by itself, unless its rank ends it before.
WORKER_GRACE_S = 120.0

DESCRIPTORS = "/proc/self/fd"  # of Linux: opening an entry opens its file once more


def start_reading(loader: DataLoader) -> Iterator[Any]:
    """Start the loader's worker processes, under the name by which a preemption finds them, and return its batches."""
    batches = iter(loader)
    for process in getattr(batches, "_workers", []):
        process.name = WORKER_NAME

    return batches


def start_worker(files: dict[int, int], worker: int) -> None:
    """Prepare a worker process, which was forked when `files` (see `open_files`) were open."""
    _die_with_rank()
    outlive_signals()
    reopen(files)


def _die_with_rank() -> None:
    """End with the rank, even in the middle of a sample: if its launcher is killed too, nobody else would see to it."""
    rank = multiprocessing.parent_process()
    # A fork server, of which this process may be a child, ends with the rank as well.
    if rank is not None and rank.pid is not None and multiprocessing.get_start_method() == "fork":
        die_with_parent(rank.pid)
    else:
        signal_on_parents_death(signal.SIGKILL)


def open_files() -> dict[int, int]:
    """Return the descriptors of the files that this process may read from, and where it is in each."""
    offsets: dict[int, int] = {}
    folder = Path(DESCRIPTORS)
    for descriptor in [int(entry.name) for entry in folder.iterdir()] if folder.is_dir() else []:
        # The listing's own descriptor is closed by now.
        with contextlib.suppress(OSError):
            readable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
            if readable and stat.S_ISREG(os.fstat(descriptor).st_mode):
                offsets[descriptor] = os.lseek(descriptor, 0, os.SEEK_CUR)
    return offsets


def reopen(files: dict[int, int]) -> None:
    """Give this process its own position in each file: forked processes share one, and would move it under each other.

    The descriptors keep their numbers, so file objects and libraries that hold them need not know.
    """
    for descriptor, offset in files.items():
        # A file that may not be opened again stays shared; the first micro-batch is compared with the rank's own.
        with contextlib.suppress(OSError):
            # A temporary file also has flags that would make another one, or follow no link to it.
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND)
            own = os.open(f"{DESCRIPTORS}/{descriptor}", flags)
            os.lseek(own, offset, os.SEEK_SET)
            os.dup2(own, descriptor, inheritable=False)
            os.close(own)


def outlive_signals() -> None:
    """Make a worker process survive the signals of a preemption.

    Schedulers signal all processes of a job, but a rank needs its workers until it has saved. They end with the
    rank, or WORKER_GRACE_S after a SIGTERM.
    """
    # Ctrl-C reaches the whole process group, SIGUSR1 is Slurm's warning.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_later)


def _exit_later(number: int, frame: Any) -> None:
    timer = threading.Timer(WORKER_GRACE_S, os._exit, (0,))
    timer.daemon = True
    timer.start()
