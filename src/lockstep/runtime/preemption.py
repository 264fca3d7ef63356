"""Preemption: a signal only sets a flag.

The step's control word carries the flag to all ranks, which save and exit together. A process without a launcher whose
first step has not begun has nothing to save and ends at once.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, NoReturn

from lockstep.errors import Preempted
from lockstep.runtime.heartbeat import FOLDER

# Schedulers send one of these some time before they kill. SIGINT is Ctrl-C at a terminal.
SCHEDULER_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STOP_SIGNALS = (*SCHEDULER_SIGNALS, signal.SIGINT)

# The name, in this process, of worker processes that read the training data.
WORKER_NAME = "lockstep-worker"


# The handlers of the present run, each with the handler that it has replaced.
_replaced: dict[int, tuple[Any, Any]] = {}

# While worker processes are being started, the children that this process had before; None at other times.
_older_children: list[BaseProcess] | None = None


@contextmanager
def starting_workers() -> Iterator[None]:
    """Count every process that is forked in this context as a worker, before it has a worker's name and handlers."""
    global _older_children
    _older_children = multiprocessing.active_children()
    try:
        yield
    finally:
        _older_children = None


class PreemptionNotice:
    """Holds the signal that asked this process to save and exit, if one did."""

    def __init__(self, waits: bool = True) -> None:
        """`waits`: the process continues until its state is saved. False until there is something to save."""
        self.signal: str | None = None
        self.waits = waits
        self._process = os.getpid()

        # One byte, which is shared with processes that are forked from this one: 1 once this process is leaving.
        self._left = mmap.mmap(-1, 1)

    def receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._receive_in_child(number)
            return

        if not self.waits:
            self._leave(signal.Signals(number).name)

        # A second Ctrl-C ends the process at once.
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _print_now("\nlockstep: saving after this step, then stopping; Ctrl-C again to stop at once")

        self.signal = signal.Signals(number).name

    def _receive_in_child(self, number: int) -> None:
        # Schedulers signal all processes of a job. The rank needs its workers until it has saved, and one that is being
        # started has not set its own handlers yet.
        if self._left[0] or _older_children is None:
            signal.signal(number, _replaced[number][1] if number in _replaced else signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def release_children(self) -> None:
        """Let processes that were forked from this one end on a signal again."""
        self._left[0] = 1

    def _leave(self, name: str) -> NoReturn:
        self.waits = True  # a second signal does not interrupt what follows
        self.release_children()
        _print_now(f"lockstep: {name} came before the first step; there is nothing to save")

        # Workers ignore signals, and at exit Python would wait for one that hangs. Torch's handler of SIGCHLD raises
        # when a worker is killed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for child in multiprocessing.active_children():
            if child.name == WORKER_NAME or (_older_children is not None and child not in _older_children):
                child.kill()
        raise Preempted(0, name, None)


def _print_now(text: str) -> None:
    """Print in a signal handler, which may have interrupted a print: Python's files refuse a second one then."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())


@contextmanager
def handle_signals() -> Iterator[PreemptionNotice]:
    """Turn signals into a notice while the context lasts.

    Under our launcher a rank does not handle Ctrl-C: the launcher receives it and sends SIGTERM to the ranks. The
    launcher also kills ranks that do not react.
    """
    launched = FOLDER in os.environ
    notice = PreemptionNotice(waits=launched)
    numbers = SCHEDULER_SIGNALS if launched else STOP_SIGNALS
    for number in numbers:
        # None: the handler was set by C code and cannot be restored.
        _replaced[number] = notice.receive, signal.getsignal(number) or signal.SIG_DFL

    try:
        with signal_handler(notice.receive, numbers), _same_handler(signal.SIGCHLD):
            try:
                yield notice
            finally:
                notice.release_children()
    finally:
        _replaced.clear()


def _restore_handlers_in_child() -> None:
    """Give a process that the user's code forks during a run the handlers from before it, so that terminate() ends it.

    Workers keep the run's handlers until they have their own (`starting_workers`).
    """
    for number, (ours, before) in _replaced.items() if _older_children is None else ():
        if signal.getsignal(number) == ours:
            signal.signal(number, before)
    _deliver_signals()


def _hold_signals() -> None:
    """Hold signals during a fork: Python forgets those that a new process gets before it has its own handlers.

    Not while the handler may raise (`waits` is false): Python drops an exception of a function that runs at a fork.
    """
    if any(ours.__self__.waits for ours, _ in _replaced.values()):
        _held.before = signal.pthread_sigmask(signal.SIG_BLOCK, SCHEDULER_SIGNALS)


def _deliver_signals() -> None:
    if (before := getattr(_held, "before", None)) is not None:
        _held.before = None
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# The signal mask from before the fork in which this thread is.
_held = threading.local()

os.register_at_fork(before=_hold_signals, after_in_parent=_deliver_signals, after_in_child=_restore_handlers_in_child)


@contextmanager
def _same_handler(number: int) -> Iterator[None]:
    """Restore the handler of a signal at the end of the context if `PreemptionNotice._leave` has removed it.

    Only Python's main thread can set, or remove, a handler.
    """
    before = signal.getsignal(number)
    try:
        yield
    finally:
        removed = before not in (None, signal.SIG_DFL) and signal.getsignal(number) is signal.SIG_DFL
        if removed and threading.current_thread() is threading.main_thread():
            signal.signal(number, before)


@contextmanager
def signal_handler(receive: Callable[[int, FrameType | None], None], numbers: Sequence[int]) -> Iterator[None]:
    """Have `receive` handle these signals while the context lasts.

    Only Python's main thread may handle signals; elsewhere nothing is handled.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, receive) for number in numbers if in_main_thread}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: the handler was set by C code and cannot be restored.
            signal.signal(number, handler or signal.SIG_DFL)
