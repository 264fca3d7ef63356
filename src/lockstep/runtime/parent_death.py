"""Processes that end with their parent, whatever killed it: the kernel (Linux) sends them a signal."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

# From <sys/prctl.h>.
PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which forked it, dies.

    This ends processes that cannot notice it themselves: suspended ones, and ones that hold the GIL.
    """
    signal_on_parents_death(signal.SIGKILL)

    # It may have died before that.
    if os.getppid() != parent:
        os._exit(1)


def signal_on_parents_death(number: int) -> None:
    """Have the kernel send this process a signal when its parent dies, or the thread of it that forked this process."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
