"""What a launcher prints."""

from __future__ import annotations

import sys

from lockstep.errors import printable


def say(text: str) -> None:
    """Print a text to stderr, even if parts of it come from ranks and other nodes."""
    # Show the cursor: a rank 0 that was killed could not restore the terminal after its progress display.
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)

    print(printable(text), file=sys.stderr, flush=True)
