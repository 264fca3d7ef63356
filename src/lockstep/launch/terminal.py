"""What a launcher prints."""

from __future__ import annotations

import os
import sys

from lockstep.errors import printable

# Environment variable: the launchers of all nodes write to the same log. What concerns the job is then printed by the
# coordinating node only, and the user resumes the job with one command instead of one for each node.
ONE_LOG = "LOCKSTEP_ONE_LOG"


def shares_log() -> bool:
    """Return whether this launcher writes to the same log as those of the other nodes."""
    return ONE_LOG in os.environ


def say(text: str) -> None:
    """Print a text to stderr, even if parts of it come from ranks and other nodes."""
    # Show the cursor: a rank 0 that was killed could not restore the terminal after its progress display.
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)

    print(printable(text), file=sys.stderr, flush=True)
