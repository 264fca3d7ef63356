"""The live display. This is the only module that imports rich.

It needs a terminal. A run without one, or with `log.progress=plain`, does not import it.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.errors import printable
from lockstep.observe.console import Display, Record, event_line, metric_parts, never_raises, title_parts
from lockstep.observe.formats import (
    SAMPLE,
    duration,
    figures,
    megabytes,
    number,
    one_line,
    rate,
    rate_key,
    scientific,
)

STYLES = {"loss": "bold", "eval": "green", "skipped": "yellow", "waiting for data": "yellow"}


class LiveDisplay(Display):
    """A few lines at the bottom of the terminal, redrawn by rich's thread; everything else scrolls above them.

    That thread takes no lock: it only reads attributes, whose values are replaced and never modified.
    """

    def __init__(self, total_steps: int, unit: str, stream: TextIO):
        super().__init__(total_steps, unit, stream)
        self._open = False
        self._last_eval: Record = {}

        # When the run began, and when the last record came.
        self._began = self._updated = time.monotonic()
        self._live = Live(
            console=Console(file=stream),
            get_renderable=self._frame,
            refresh_per_second=4,
            # Output of the task scrolls above the display, unless the user redirected it to a file.
            redirect_stdout=bool(sys.stdout and sys.stdout.isatty()),
            redirect_stderr=bool(sys.stderr and sys.stderr.isatty()),
        )

    @never_raises
    def start(self, start: Record) -> None:
        self.start_event = start
        self._began = self._updated = time.monotonic()
        # Before `start`, while sys.stdout and sys.stderr are still the real streams.
        _restore_streams_in_children(self._live)
        self._open = True
        self._live.start()

    @never_raises
    def update(self, record: Record) -> None:
        self.track(record)
        self._updated = time.monotonic()

    @never_raises
    def event(self, record: Record) -> None:
        # The frame shows start, end and evaluations; everything else scrolls above it.
        if record.get("event") == "eval" and record.get("monitor", True):
            self._last_eval = record
        elif record.get("event") not in ("start", "end"):
            self.message(event_line(record))

    @never_raises
    def message(self, text: str) -> None:
        # A Text, not a string: rich would read [brackets] in a string as its own markup.
        self._live.console.print(Text(printable(text)))

    @never_raises
    def close(self) -> None:
        # The last frame stays on the terminal.
        self._open = False
        self._live.stop()

    # ---- drawing, in rich's thread ----

    def _frame(self) -> RenderableType:
        title = Text(" · ".join(title_parts(self.start_event)), style="bold", no_wrap=True, overflow="ellipsis")

        # Building and compiling a model may take minutes.
        if not self.last:
            return Group(title, self._bar(), Text("waiting for the first step", style="dim"))

        lines = (self._loss_parts(), self._optimizer_parts(), self._speed_parts())
        return Group(title, self._bar(), *map(_labelled, lines))

    def _bar(self) -> RenderableType:
        now = time.monotonic()
        total = self.total_steps
        step = number(self.last.get("step")) or 0
        words = [f"{step:.0f}/{total}", f"{step / max(1, total):.0%}", f"{duration(now - self._began)} elapsed"]

        # Between records the time left counts down. After the end there is none to show.
        if self._open:
            left = self.seconds_left
            words.append(f"{duration(None if left is None else left - (now - self._updated))} left")

        # The bar gets the width that the words do not need.
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)

        row.add_row(ProgressBar(total=total, completed=step), "  ".join(words))
        return row

    def _loss_parts(self) -> Iterable[tuple[str, str]]:
        evaluation = self._last_eval
        yield "loss", figures(self.last.get("loss"), 4)
        if evaluation:
            yield "eval", f"{figures(evaluation.get('loss'), 4)} at {one_line(evaluation.get('step', '-'))}"

    def _optimizer_parts(self) -> Iterable[tuple[str, str]]:
        last = self.last
        yield "lr", scientific(last.get("lr"))
        yield "norm", figures(last.get("grad_norm"), 3)

        # Only fp16 has a loss scale.
        if (scale := number(last.get("scale"))) is not None:
            yield "scale", f"{scale:g}"

        yield from metric_parts(last)
        if number(last.get("skipped")):
            yield "skipped", str(last["skipped"])

    def _speed_parts(self) -> Iterable[tuple[str, str]]:
        last = self.last
        yield "", rate(last.get(rate_key(self.unit)), self.unit)

        # A task that counts tokens has samples as well.
        if self.unit != SAMPLE:
            yield "", rate(last.get(rate_key(SAMPLE)), SAMPLE)

        yield "mem", megabytes(last.get("memory_mb"))

        # A little waiting is normal.
        wait = number(last.get("data_wait_s"))
        step = number(last.get("step_s"))
        if wait and step and wait >= 0.05 * step:
            yield "waiting for data", f"{wait / step:.0%}"


def _labelled(parts: Iterable[tuple[str, str]]) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for label, value in parts:
        line.append("   " if line else "").append(f"{label} " if label else "", "dim")
        line.append(value, STYLES.get(label, ""))

    return line


def _restore_streams_in_children(live: Live) -> None:
    """Give forked data workers the real stdout and stderr.

    While rich draws, it replaces both streams and takes a lock to write. A worker that is forked while the drawing
    thread holds that lock would wait for it forever at its first print.
    """
    # A fork hook cannot be removed, so it must not keep the display alive.
    drawing = weakref.ref(live)
    streams = (sys.stdout, sys.stderr)

    def restore() -> None:
        parent = drawing()
        if parent is not None and parent.is_started:
            sys.stdout, sys.stderr = streams

    os.register_at_fork(after_in_child=restore)
