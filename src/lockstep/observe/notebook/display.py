"""The display in a notebook: one output of the cell, which is replaced a few times a second.

A notebook keeps every output in its file, so the display replaces one output instead of adding lines, and keeps a
limited number of them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any, TextIO

from lockstep.errors import printable
from lockstep.observe.charts import Point
from lockstep.observe.console import Display, Record, event_line, never_raises, step_line, title_parts
from lockstep.observe.formats import escaped, number
from lockstep.observe.notebook.curve import curve_svg, sparkline

REDRAW_S = 0.25  # least time between two pictures: each is sent to the browser
MAX_LINES = 200  # lines of text that stay visible: the facts at the start, events, warnings


class NotebookDisplay(Display):
    """Shows a bar, the newest numbers, the curve of the loss, and the lines of text that a terminal would show.

    It has the interface of every display. No method raises: an error while drawing must not end a training.
    """

    def __init__(self, total_steps: int, unit: str, stream: TextIO):
        super().__init__(total_steps, unit, stream)
        self._lines: deque[str] = deque(maxlen=MAX_LINES)

        # Points for the whole run: the picture shows only as many as it can.
        self._curves: dict[str, list[Point]] = {"loss": [], "eval_loss": []}

        self._handle: Any = None  # the handle of the output in the cell, once there is one
        self._drawn = -math.inf

    @never_raises
    def start(self, start: Record) -> None:
        self.start_event = start
        self._draw()

    @never_raises
    def update(self, record: Record) -> None:
        self.track(record)
        self._add_point("loss", record)
        self._draw_if_due()

    @never_raises
    def event(self, record: Record) -> None:
        # `start` has shown the start, and an error is raised into the cell.
        if record.get("event") in ("start", "failure", "error"):
            return

        if record.get("event") == "eval" and record.get("monitor", True):
            self._add_point("eval_loss", record)

        self._lines += printable(event_line(record)).splitlines()
        self._draw_if_due()

    @never_raises
    def message(self, text: str) -> None:
        self._lines += printable(text).splitlines()
        self._draw_if_due()

    @never_raises
    def close(self) -> None:
        self._draw()

    # ---- drawing ----

    def _add_point(self, name: str, record: Record) -> None:
        """Add a point to a curve. A record without a loss has none."""
        step, loss = number(record.get("step")), number(record.get("loss"))
        if step is not None and loss is not None:
            self._curves[name].append((step, loss))

    def _draw_if_due(self) -> None:
        """Draw, unless the last picture is only a moment old."""
        if time.monotonic() - self._drawn >= REDRAW_S:
            self._draw()

    def _draw(self) -> None:
        """Show text and picture; the front end takes the one that it can show. Later calls replace them in place."""
        # The kernel has imported it: see `kernel.shell`.
        from IPython.display import display

        # The first call makes an output in the cell, and later ones replace it.
        shown = {"text/plain": self._text(), "text/html": self._html()}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

        self._drawn = time.monotonic()

    def _text(self) -> str:
        """Return the text that a front end without HTML shows."""
        lines = ["  ".join(title_parts(self.start_event)), *self._lines]
        if self.last:
            lines.append(step_line(self))

        if self._curves["loss"]:
            lines.append(f"loss  {sparkline([y for _, y in self._curves['loss']])}")

        return printable("\n".join(lines))

    def _html(self) -> str:
        """Return the picture: a bar, the newest numbers, the curves, and the lines of text."""
        step = number(self.last.get("step")) or 0
        numbers = step_line(self) if self.last else "waiting for the first step"
        return (
            f"<div><b>{escaped(' · '.join(title_parts(self.start_event)))}</b><br/>"
            f'<progress max="{self.total_steps}" value="{step:.0f}" style="width: 30em"></progress>'
            f'<pre style="margin: 0.3em 0">{escaped(numbers)}</pre>{curve_svg(self._curves)}'
            f'<pre style="margin: 0.3em 0; max-height: 20em; overflow: auto">{escaped(chr(10).join(self._lines))}</pre>'
            "</div>"
        )
