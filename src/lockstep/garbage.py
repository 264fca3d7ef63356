"""Pause Python's garbage collector. It belongs to the whole process, so several threads may want it paused at once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0  # that have not ended
_was_on = False  # before the first of them


@contextmanager
def paused() -> Iterator[None]:
    """Keep the collector from running, in all threads, until the last of several pauses ends."""
    global _pauses, _was_on

    with _lock:
        # The first pause remembers whether the collector was on, and the last one restores that.
        if not _pauses:
            _was_on = gc.isenabled()
            gc.disable()

        _pauses += 1

    try:
        yield
    finally:
        with _lock:
            _pauses -= 1

            if _was_on and not _pauses:
                gc.enable()
