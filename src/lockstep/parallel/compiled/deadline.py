"""A limit for the time that compiling takes, and reports of how long it has taken.

torch.compile has no limit of its own. So we look at the clock wherever torch hands over to us while it compiles, and
raise an exception there (`Deadline`). torch treats it like any other failure to compile. The places are:

    before it traces a function, or goes on behind a graph break
    when it has traced a graph, before code is generated for it (see `targets.py`)
    before it compiles a backward, which it does when the first one runs: on a GPU in a thread of autograd

Nothing is interrupted between these places. One graph whose code alone takes very long to generate is finished, and
given up at the next look at the clock, if there is one. How long it took is remembered, also if the run is killed
meanwhile (`CompileFacts.remember_unfinished`), so that the next run does not try.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

import torch

PROGRESS_S = 5.0  # seconds between two reports of how long compiling has taken so far


class TookTooLong(Exception):
    """Compiling has reached its limit."""

    def __init__(self, limit_s: float):
        super().__init__(f"it takes longer than {limit_s:.0f} s to compile")


class Deadline:
    """Limits the time that torch may take to compile what a `with` block runs; the block then raises TookTooLong.

    The time begins with the constructor.
    """

    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        self._ends = time.monotonic() + limit_s
        self._thread = threading.get_ident()  # the one that runs the block
        self._gave_up = False

    def check(self) -> None:
        """Raise TookTooLong if the time is over. After the `with` block this does nothing."""
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
        self._ends = math.inf
        # torch._dynamo.reset() has removed it already.
        with suppress(ValueError):
            torch._dynamo.callback_handler.remove_start_callback(self._begin)

        # By now torch has put the exception into one of its own, or dropped it and run something eagerly.
        if self._gave_up and (error is None or isinstance(error, Exception)):
            raise TookTooLong(self._limit_s) from None


@contextmanager
def reported(progress: Callable[[float], None]) -> Iterator[None]:
    """Inside the `with` block, call `progress` with the seconds so far every few seconds, from another thread."""
    began = time.monotonic()
    ended = threading.Event()

    # `wait` returns True as soon as the block has ended.
    def report() -> None:
        while not ended.wait(PROGRESS_S):
            progress(time.monotonic() - began)

    thread = threading.Thread(target=report, name="compile progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
