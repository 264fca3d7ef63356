"""Give up a compilation that takes too long, so that it costs the run less.

torch.compile has no limit of its own. So we look at the clock wherever torch hands over to us while it compiles, and
raise an exception there, which torch treats like any other failure to compile:

    before it traces a function, or goes on behind a graph break
    when it has traced a graph, before code is generated for it (see `targets.py`)
    before it compiles a backward, which it does when the first one runs: on a GPU in a thread of autograd

Nothing is interrupted between these places. One graph whose code alone takes very long to generate is finished, and
given up at the next look at the clock, if there is one. How long it took is remembered, also if the run is killed
meanwhile (`Compilation.progress`), so that the next run does not try.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from math import inf
from typing import Any, Self

import torch


class TookTooLong(Exception):
    """Compiling has reached its limit."""

    def __init__(self, limit_s: float):
        super().__init__(f"it takes longer than {limit_s:.0f} s to compile")


class Deadline:
    """A limit, from now on, for all that torch compiles inside a `with` block, which then raises TookTooLong."""

    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        self._ends = time.monotonic() + limit_s
        self._thread = threading.get_ident()  # the one that runs the block
        self._gave_up = False

    def check(self) -> None:
        """Raise TookTooLong if the time is over. After the `with` block it never is."""
        if time.monotonic() > self._ends:
            self._gave_up = True
            raise TookTooLong(self._limit_s)

    def __enter__(self) -> Self:
        torch._dynamo.callback_handler.register_start_callback(self._begin)
        return self

    def _begin(self, compilation: Any) -> None:
        """Check the time before torch compiles something, unless a thread of the user compiles for itself."""
        is_backward = compilation.callback_trigger.name == "LAZY_BACKWARD"
        if is_backward or threading.get_ident() == self._thread:
            self.check()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._ends = inf
        # torch._dynamo.reset() has removed it already.
        with suppress(ValueError):
            torch._dynamo.callback_handler.remove_start_callback(self._begin)

        # By now torch has put the exception into one of its own, or dropped it and run something eagerly.
        if self._gave_up and (error is None or isinstance(error, Exception)):
            raise TookTooLong(self._limit_s) from None
