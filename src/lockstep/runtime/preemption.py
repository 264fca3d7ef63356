"""Preemption: a signal only sets a flag.

The step's control word carries the flag to all ranks, which save and exit together.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from lockstep.runtime.heartbeat import FOLDER

# What schedulers send some time before they kill; and all that ask to save and exit, with Ctrl-C of a terminal.
SCHEDULER_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STOP_SIGNALS = (*SCHEDULER_SIGNALS, signal.SIGINT)


class PreemptionNotice:
    """Holds the signal that asked this process to save and exit, if one did."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._process = os.getpid()

    def receive(self, number: int, frame: FrameType | None) -> None:
        # A loader process that was forked from this one ignores the signal: its rank needs it until the save is done.
        if os.getpid() != self._process:
            return

        # A second Ctrl-C does not wait.
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            print("\nlockstep: saving after this step, then stopping; Ctrl-C again to stop at once", flush=True)

        self.signal = signal.Signals(number).name


@contextmanager
def handle_signals() -> Iterator[PreemptionNotice]:
    """Turn signals into a notice while the context lasts.

    Under our launcher Ctrl-C is the launcher's, which then sends SIGTERM to the ranks.
    """
    notice = PreemptionNotice()
    with signal_handler(notice.receive, SCHEDULER_SIGNALS if FOLDER in os.environ else STOP_SIGNALS):
        yield notice


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
