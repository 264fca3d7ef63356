"""Give up a compilation that takes too long, so that it cannot cost the run.

torch.compile has no limit of its own. Here a thread raises an exception in the thread that compiles, which is another
one than ours if autograd runs the backward. It arrives when that thread next runs Python: a compiler that waits for a
process of its own is given up when that ends.

An exception may not arrive just anywhere: some of torch's C++ calls Python where it cannot pass an exception on, and
then the process aborts. So it is raised only when the thread is seen at a place where it continues in Python itself.
"""

from __future__ import annotations

import ctypes
import dis
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
SOON_S = 0.02  # look again after so long, if no thread can be interrupted now

# Where Python lets other threads run, and looks for exceptions at once when it runs again.
PAUSES = {dis.opmap[name] for name in ("RESUME", "JUMP_BACKWARD")}
# Not in code that C++ or the garbage collector calls, nor where a `with` block begins or ends.
UNSAFE_FILES = ("/torch/_library/", "/torch/fx/experimental/sym_node.py", "/weakref.py", "/contextlib.py")
UNSAFE_NAMES = {"<lambda>", "__del__", "__enter__", "__exit__", "__torch_dispatch__", "__torch_function__"}


class TookTooLong(Exception):
    """Compiling has reached its limit."""


class _Interrupt(BaseException):
    """Raised in the compiler. Not an Exception: torch catches many of those, to try something else."""


@contextmanager
def deadline(limit_s: float, progress: Callable[[float], None]) -> Iterator[None]:
    """Raise TookTooLong if the `with` block compiles for longer than this. `progress` is called with the seconds."""
    watch = _Watch(limit_s, progress)
    watch.start()
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
        self._caller = threading.get_ident()
        self._interrupted: set[int] = set()  # threads in which was raised
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
        """Raise in the threads that compile. Return whether there are any that can be interrupted now."""
        with self._lock:
            raised = False
            for ident in [] if self._stopped.is_set() else compiling_threads(self._caller):
                # Looked at again, and nothing between the look and the exception: the thread stays where it is as long
                # as this one runs.
                self._interrupted.add(ident)
                if _is_safe(sys._current_frames().get(ident)):
                    _raise_in(ident, _Interrupt)
                    raised = True

        return raised

    def stop(self) -> None:
        """End the thread, and take back the interrupts that have not arrived yet."""
        self._stopped.set()
        with self._lock:
            # Autograd's thread may have left the compiler: it would end a later backward.
            for ident in self._interrupted:
                _raise_in(ident, None)


def compiling_threads(caller: int) -> list[int]:
    """Return the threads that are inside torch's compiler: `caller`, and those of autograd.

    Threads that Python code has started are left alone: one that loads data may call torch.func, for example.
    """
    started = {t.ident for t in threading.enumerate() if not isinstance(t, threading._DummyThread)} - {caller}
    frames = sys._current_frames()
    return [ident for ident, frame in frames.items() if ident not in started and _is_compiling(frame)]


def _is_compiling(frame: FrameType | None) -> bool:
    """Return whether the stack of a thread, given by its innermost frame, is inside torch's compiler."""
    compiles = False
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name

        # A module whose import is interrupted would stay incomplete. While a thread starts another one, Python may take
        # the new one for it.
        if file.startswith("<frozen importlib") or (name == "start" and file.endswith("/threading.py")):
            return False

        compiles |= any(part in file for part in PARTS_OF_TORCH)
        frame = frame.f_back

    return compiles


def _is_safe(frame: FrameType | None) -> bool:
    """Return whether an exception that is raised in a thread now arrives in this frame, and harms nothing there."""
    if frame is None or frame.f_code.co_name in UNSAFE_NAMES:
        return False

    file = frame.f_code.co_filename
    if any(part in file for part in UNSAFE_FILES):
        return False

    # Code of torch may be inside C++, which may call other Python before it returns. Other code sleeps, waits or reads.
    return "/torch/" not in file or frame.f_code.co_code[frame.f_lasti] in PAUSES


def _raise_in(ident: int, error: type[BaseException] | None) -> None:
    """Raise in another thread, or take back what has not arrived yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(error) if error else None)
