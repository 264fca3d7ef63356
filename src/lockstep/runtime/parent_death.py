"""Processes that end with their parent, whatever killed the parent: on Linux the kernel sends them a signal."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

# From <sys/prctl.h>.
PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which forked it, dies.

    This ends processes that cannot notice the death themselves, because they are suspended or hold the GIL.
    """
    signal_on_parents_death(signal.SIGKILL)

    # The parent may have died before this.
    if os.getppid() != parent:
        os._exit(1)


def signal_on_parents_death(number: int) -> None:
    """Have the kernel send this process a signal when the parent's thread that forked this process ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
