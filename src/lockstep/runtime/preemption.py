"""Notices to leave. A signal only sets a flag; the step carries it to all ranks, and they save and go together."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lockstep.runtime.heartbeat import FOLDER

HEEDED = (signal.SIGTERM, signal.SIGUSR1)  # what schedulers send some time before they kill


class PreemptionNotice:
    """Whether, and by which signal, this process was asked to leave."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._process = os.getpid()

    def receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a loader process forked from this one: it works on until its rank leaves
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C does not wait
            print("\nlockstep: saving after this step, then stopping; Ctrl-C again to stop at once", flush=True)
        self.signal = signal.Signals(number).name


@contextmanager
def heed_signals() -> Iterator[PreemptionNotice]:
    """Only Python's main thread may handle signals; elsewhere the notice stays empty.

    Under our launcher Ctrl-C is the launcher's: it asks the ranks with SIGTERM.
    """
    notice = PreemptionNotice()
    if threading.current_thread() is not threading.main_thread():
        yield notice
        return
    ours = HEEDED if FOLDER in os.environ else (*HEEDED, signal.SIGINT)
    before = {number: signal.signal(number, notice.receive) for number in ours}
    try:
        yield notice
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was set by C code, and cannot be put back
