"""Prints for the launcher; tolerates a closed pipe."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

from lockstep.errors import printable

# Environment variable: the launchers of all nodes write to the same log. What concerns the job is then printed by the
# coordinating node only, and the user resumes the job with one command instead of one for each node.
ONE_LOG = "LOCKSTEP_ONE_LOG"


def shares_log() -> bool:
    """Return whether this launcher writes to the same log as those of the other nodes."""
    return ONE_LOG in os.environ


def print_line(text: str) -> None:
    """Print a text, of one line or more, to stderr. Parts of it may come from ranks and other nodes."""
    # Show the cursor: a rank 0 that was killed could not restore the terminal after its progress display.
    if sys.stdout.isatty():
        write("\x1b[?25h", sys.stdout)

    write(f"{printable(text)}\n", sys.stderr)


def write(text: str, stream: TextIO) -> None:
    """Write a text at once. The job goes on if its reader is gone."""
    # The reader of a pipe may be gone, as in `lockstep train ... 2>&1 | tee log`.
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        point_at_null(stream)


def point_at_null(stream: TextIO) -> None:
    """Throw away what is written from now on: Python flushes stdout at exit, and exits with 120 if that fails."""
    # A stream without a descriptor is not flushed at exit.
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
