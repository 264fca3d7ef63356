"""A sink on a thread of its own, so that a slow service never holds up training.

A sink may wait for a service, or fail. Neither may cost a step: records wait in a queue, a failure is reported once on
stderr, and the end of a run waits for a few seconds at most.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.observe.sinks.sink import Sink

# Records that may wait. A run writes one every few seconds, so a sink that is this far behind does not recover.
MOST_WAITING = 10_000

# How long the end of a run waits for the records that are still waiting.
LAST_S = 10.0


class BackgroundSink:
    """Passes records to a sink on a side thread, in order. A sink that fails is reported once and gets no more.

    `write` is called by the training loop and never waits. The sink itself runs on the thread alone, so it needs no
    locks.
    """

    def __init__(self, name: str, sink: Sink, report: Callable[[str], None]):
        self.name = name
        self._sink = sink
        self._report = report
        # A user's class may be derived from nothing.
        if isinstance(sink, Sink):
            sink.report = report

        # One queue: records arrive in the order in which they were written.
        self._waiting: queue.Queue[Mapping[str, Any] | None] = queue.Queue(MOST_WAITING)
        self._dropped = False

        # A daemon: the process may end while a service still does not answer.
        self._thread = threading.Thread(target=self._pass_on, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, Any]) -> None:
        """Queue one record. This never waits."""
        if self._dropped:
            return

        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._drop(f"it is {MOST_WAITING} records behind")

    def close(self) -> None:
        """Wait a moment for the records that are still waiting, and close the sink."""
        # The sink is closed by its own thread, after the last record.
        deadline = time.monotonic() + LAST_S
        try:
            # None ends the thread. A sink that was dropped takes nothing any more.
            self._waiting.put(None, timeout=0 if self._dropped else LAST_S)
            self._thread.join(deadline - time.monotonic())
        except queue.Full:
            pass

        if self._thread.is_alive() and not self._dropped:
            self._drop(f"it did not take the last records within {LAST_S:.0f} s")

    def _pass_on(self) -> None:
        """Pass records on until the end, or until the sink fails. Runs on a thread of its own."""
        while not self._dropped:
            record = self._waiting.get()
            try:
                if record is None:
                    self._sink.close()
                    return

                self._sink.write(record)
            except Exception as error:
                # It is not called again: a service that is down would cost its timeout at every record.
                self._drop(f"{type(error).__name__}: {error}")

    def _drop(self, reason: str) -> None:
        """Pass no more records on, and say why, once."""
        self._dropped = True
        self._report(f"the sink {self.name} failed and gets no more records: {reason}")
