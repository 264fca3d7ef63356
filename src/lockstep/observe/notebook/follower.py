"""Shows a run of other processes in the notebook that started it, by following the records in its folder.

The ranks of `fit(nproc=2)` cannot write into the cell. What they write into the run folder is read a few times a second
and shown as if this process had trained.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep import files
from lockstep.observe.console import Display, fact_lines, open_display
from lockstep.observe.formats import SAMPLE, number
from lockstep.observe.run_list import parse_lines
from lockstep.run_folder.names import EVENTS, METRICS

LOOK_S = 0.25


@contextmanager
def following(run_dir: Path) -> Iterator[None]:
    """Show the records that a run writes into its folder while the body runs, and no earlier ones."""
    follower = Follower(run_dir)

    over = threading.Event()

    def follow() -> None:
        while not over.wait(LOOK_S):
            follower.look()

    # The kernel finds the cell that an output belongs to in the context of the thread.
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=[follow], daemon=True, name="lockstep-notebook")
    thread.start()

    try:
        yield
    finally:
        # Once more after the end: the last records may have come since the last look.
        over.set()
        thread.join()

        # Records that were written after the thread's last look.
        follower.look()
        follower.close()


class Follower:
    """Reads what has been appended to the records of a run since the last look, and shows it.

    The ranks are other processes, so their records come to the notebook through the files of the run folder.
    """

    def __init__(self, run_dir: Path):
        self._files = [run_dir / name for name in (EVENTS, METRICS)]

        # Where each file has been read to, in bytes.
        self._read = {path: path.stat().st_size if path.exists() else 0 for path in self._files}
        self._display: Display | None = None

    def look(self) -> None:
        """Show the new records in the order of their times."""
        # Two files, so the records of both are put in one order.
        new = [record for path in self._files for record in self._new_records(path)]
        for record in sorted(new, key=lambda record: number(record.get("time")) or 0.0):
            self._show(record)

    def close(self) -> None:
        """Close the display, which draws its last picture."""
        if self._display is not None:
            self._display.close()

    def _new_records(self, path: Path) -> list[dict[str, Any]]:
        """Return the records that were written to a file since the last look."""
        text = files.read(path, start=self._read[path])

        # The rest is a line that is being written.
        whole = text[: text.rfind("\n") + 1]
        self._read[path] += len(whole.encode())
        return parse_lines(whole)

    def _show(self, record: dict[str, Any]) -> None:
        """Show one record. The start event opens the display."""
        # A restarted run begins once more, in the same place.
        if record.get("event") == "start" and self._display is None:
            steps = number(record.get("steps")) or 0
            self._display = open_display("auto", int(steps), str(record.get("unit", SAMPLE)), sys.stdout)

            self._display.start(record)
            for name, fact in (record.get("facts") or {}).items():
                self._display.message(fact_lines(name, str(fact)))

        if self._display is None:
            return

        # Metrics have no key `event`.
        if "event" in record:
            self._display.event(record)
        else:
            self._display.update(record)
