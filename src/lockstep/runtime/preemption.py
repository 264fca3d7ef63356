"""Preemption: a signal only sets a flag.

The step's control word carries the flag to all ranks, which save and exit together. A process without a launcher whose
first step has not begun has nothing to save and ends at once.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from lockstep.errors import Preempted
from lockstep.runtime import attempt_folder

# Schedulers send one of these some time before they kill. SIGINT is Ctrl-C at a terminal.
SCHEDULER_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
PREEMPT_SIGNALS = (*SCHEDULER_SIGNALS, signal.SIGINT)

# The name, in this process, of worker processes that read the training data.
WORKER_NAME = "lockstep-worker"


# Ray Train has imported this module in each of its workers.
RAY_TRAIN_CONTEXT = "ray.train.v2._internal.execution.context"


def ray_train_notice() -> object | None:
    """Return Ray Train's notice that nodes of this run will be taken away; None if there is none, or no Ray Train.

    Its public function, `ray.train.get_preemption_info`, is a barrier of all workers: it would cost every step a trip
    through an actor, and could not be mixed with the user's own calls. So the notice is read where that function reads
    it, and the control word tells the other ranks.
    """
    context = sys.modules.get(RAY_TRAIN_CONTEXT)
    if context is None:
        return None

    # Outside a worker there is no context, and in older versions of Ray the context has no notice.
    try:
        return context.get_train_context().preemption_context.preemption_info
    except (RuntimeError, AttributeError):
        return None


class PreemptionNotice:
    """Holds the signal that asked this process to save and exit, if one did.

    The handler only notes the signal: it may arrive in the middle of anything. The step reads the note and carries it
    to all ranks. A second Ctrl-C does not wait for that.
    """

    def __init__(self, waits: bool = True) -> None:
        """`waits`: the process continues until its state is saved. False until there is something to save."""
        self.signal: str | None = None

        # The signal that the launcher received before it signalled its ranks; None if the job goes on with other ranks.
        # Without a launcher, and if the signal did not come from it, the same as `signal`.
        self.original: str | None = None

        self.waits = waits
        self._process = os.getpid()

        # The notice of Ray Train that the newest checkpoint was saved for, or that came before it.
        self._saved_for: object | None = None

        # One byte, which is shared with processes that are forked from this one: 1 once this process is leaving.
        self._leaving = mmap.mmap(-1, 1)

    def receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._receive_in_child(number)
            return

        if not self.waits:
            self._leave(signal.Signals(number).name)

        # A second Ctrl-C ends the process at once.
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _print_now("\nlockstep: saving after this step, then exiting; Ctrl-C again to exit at once")

        name = signal.Signals(number).name
        said = _said_by_launcher()
        self.original = name if said is None else said or None
        self.signal = name

    def defer_to_step_end(self) -> None:
        """Let a signal take effect after the step, with a save. Before this it may end the process at once."""
        self.waits = True

    def asks_for_save(self) -> bool:
        """Return whether Ray Train has announced, since the last save, that a node will be taken away.

        The run saves and goes on: Ray Train restarts it when the node is gone, and would count an exception before
        that as a failure.
        """
        info = ray_train_notice()
        return info is not None and info != self._saved_for

    def saved(self) -> None:
        self._saved_for = ray_train_notice()

    def _receive_in_child(self, number: int) -> None:
        # Schedulers signal all processes of a job. The rank needs the processes that it forked until it has saved.
        if self._leaving[0]:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def release_children(self) -> None:
        """Let processes that were forked from this one end on a signal again."""
        self._leaving[0] = 1

    def _leave(self, name: str) -> NoReturn:
        self.waits = True  # a second signal does not interrupt what follows
        self.release_children()
        _print_now(f"lockstep: {name} came before the first step; there is nothing to save")

        # Workers ignore signals, and at exit Python would wait for one that hangs. Torch's handler of SIGCHLD raises
        # when a worker is killed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for child in multiprocessing.active_children():
            if child.name == WORKER_NAME:
                child.kill()

        raise Preempted(0, name, None)


def _said_by_launcher() -> str | None:
    """Return what our launcher has written for its ranks before it signalled them; None if it did not."""
    folder = attempt_folder.current()
    try:
        return None if folder is None else attempt_folder.preempt_signal(folder).read_text()
    except OSError:
        return None


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
    launched = attempt_folder.current() is not None
    notice = PreemptionNotice(waits=launched)
    with (
        signal_handler(notice.receive, SCHEDULER_SIGNALS if launched else PREEMPT_SIGNALS),
        _same_handler(signal.SIGCHLD),
    ):
        try:
            yield notice
        finally:
            notice.release_children()


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
