"""What a launcher says to people."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)  # a killed rank 0 could not put its display away
    print(text, file=sys.stderr, flush=True)
