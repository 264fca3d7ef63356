"""Give up a compilation that takes too long, so that it cannot cost the run.

torch.compile has no limit of its own. Here a thread raises an exception in the thread that compiles, which is another
one than ours if autograd runs the backward. It arrives when that thread next runs Python: a compiler that waits for a
process of its own is given up when that ends.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# Of a thread that traces or compiles, and of none that only reads what compiler processes say.
PARTS_OF_TORCH = ("/torch/_dynamo/", "/torch/_functorch/")
PROGRESS_S = 5.0  # seconds between two calls of `progress`
AGAIN_S = 3.0  # raise once more if it still compiles after so long: Python drops what is raised in some callbacks
SOON_S = 0.1  # look again after so long, if no thread can be interrupted now


class TookTooLong(Exception):
    """Compiling has reached its limit."""


class _Interrupt(BaseException):
    """Raised in the compiler. Not an Exception: torch catches many of those, to try something else."""


@contextmanager
def deadline(limit_s: float, progress: Callable[[float], None]) -> Iterator[None]:
    """Raise TookTooLong if the `with` block compiles for longer than this. `progress` is called with the seconds."""
    watch = _Watch(limit_s, progress)
    watch.start()

    # Two of them: the inner one ends the watch in any case, the outer one also catches what arrives while it does.
    try:
        try:
            yield
        finally:
            watch.stop()
    except _Interrupt:
        # It may arrive as late as in `stop`.
        watch.stop()
        raise TookTooLong(f"it takes longer than {limit_s:.0f} s to compile") from None


class _Watch(threading.Thread):
    """The thread that reports progress, and interrupts the compiler after the limit."""

    def __init__(self, limit_s: float, progress: Callable[[float], None]):
        super().__init__(name="compile deadline", daemon=True)
        self._limit_s = limit_s
        self._progress = progress
        self._stopped = threading.Event()
        self._lock = threading.Lock()  # nothing is raised once `stop` has returned

    def run(self) -> None:
        """Call `progress` every few seconds. From the limit on, interrupt until `stop` is called."""
        began = time.monotonic()
        passed_s = 0.0
        next_s = self._limit_s  # when to interrupt next, in seconds since the start

        while not self._stopped.wait(min(PROGRESS_S, next_s - passed_s)):
            passed_s = time.monotonic() - began
            self._progress(passed_s)

            # Now and then no thread can be interrupted, because it imports a module.
            if passed_s >= next_s:
                next_s = passed_s + (AGAIN_S if self._interrupt() else SOON_S)

    def _interrupt(self) -> bool:
        """Raise in the threads that compile. Return whether there are any."""
        with self._lock:
            # `stop` may have been called since this thread looked last.
            threads = [] if self._stopped.is_set() else compiling_threads()
            for ident in threads:
                _raise_in(ident, _Interrupt)

        return bool(threads)

    def stop(self) -> None:
        """End the thread, and take back an interrupt of the calling thread that has not arrived yet."""
        self._stopped.set()
        with self._lock:
            _raise_in(threading.get_ident(), None)


def compiling_threads() -> list[int]:
    """Return the threads that are inside torch's compiler."""
    return [ident for ident, frame in sys._current_frames().items() if _is_compiling(frame)]


def _is_compiling(frame: FrameType | None) -> bool:
    """Return whether the stack of a thread, given by its innermost frame, is inside torch's compiler."""
    # The files of all frames, from the innermost out.
    files = []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back

    # A module whose import is interrupted would stay incomplete.
    importing = any(file.startswith("<frozen importlib") for file in files)
    return not importing and any(part in file for part in PARTS_OF_TORCH for file in files)


def _raise_in(ident: int, error: type[BaseException] | None) -> None:
    """Raise in another thread, or take back what has not arrived yet."""
    # Only the C API has this: there is no function for it in `threading`.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(error) if error else None)
