"""Preemption: a signal only sets a flag.

The step's control word carries the flag to all ranks, which save and exit together. A process without a launcher whose
first step has not begun has nothing to save, and ends at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from lockstep.errors import Preempted
from lockstep.runtime.heartbeat import FOLDER

# What schedulers send some time before they kill; and all that ask to save and exit, with Ctrl-C of a terminal.
SCHEDULER_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STOP_SIGNALS = (*SCHEDULER_SIGNALS, signal.SIGINT)


class PreemptionNotice:
    """Holds the signal that asked this process to save and exit, if one did."""

    def __init__(self, waits: bool = True) -> None:
        """`waits`: the process goes on until its state is saved. False until there is something to save."""
        self.signal: str | None = None
        self.waits = waits
        self._process = os.getpid()

    def receive(self, number: int, frame: FrameType | None) -> None:
        # A worker process that was forked from this one ignores the signal: its rank needs it until the save is done.
        if os.getpid() != self._process:
            return

        if not self.waits:
            self._leave(signal.Signals(number).name)

        # A second Ctrl-C does not wait.
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            print("\nlockstep: saving after this step, then stopping; Ctrl-C again to stop at once", flush=True)

        self.signal = signal.Signals(number).name

    def _leave(self, name: str) -> NoReturn:
        self.waits = True  # what follows is not interrupted
        print(f"lockstep: {name} came before the first step; there is nothing to save", file=sys.stderr, flush=True)

        # Worker processes outlive signals, and one that hangs would be waited for. Torch's handler of SIGCHLD raises
        # when one is killed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for child in multiprocessing.active_children():
            if child.daemon:
                child.kill()
        raise Preempted(0, name, None)


@contextmanager
def handle_signals() -> Iterator[PreemptionNotice]:
    """Turn signals into a notice while the context lasts.

    Under our launcher Ctrl-C is the launcher's, which then sends SIGTERM to the ranks; and it ends ranks that do not
    move.
    """
    launched = FOLDER in os.environ
    notice = PreemptionNotice(waits=launched)
    with signal_handler(notice.receive, SCHEDULER_SIGNALS if launched else STOP_SIGNALS), _same_handler(signal.SIGCHLD):
        yield notice


@contextmanager
def _same_handler(number: int) -> Iterator[None]:
    """Restore the handler of a signal that is taken away while the context lasts.

    Only Python's main thread may: it is also the only one in which a handler can have been taken away.
    """
    before = signal.getsignal(number)
    try:
        yield
    finally:
        taken_away = before not in (None, signal.SIG_DFL) and signal.getsignal(number) is signal.SIG_DFL
        if taken_away and threading.current_thread() is threading.main_thread():
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
