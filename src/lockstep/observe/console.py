"""The terminal of rank 0: a live display, plain lines, or nothing.

A display shows the records that also go to `metrics.jsonl` and `events.jsonl`, and adds only the time left.
It never raises into training: a missing key shows as `-`, and a closed terminal ends the output.
"""

from __future__ import annotations

import os
import statistics
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Literal, TextIO, get_args

from lockstep.errors import printable, unknown_name
from lockstep.launch.terminal import point_at_null
from lockstep.observe.formats import (
    compact,
    duration,
    event_words,
    figures,
    megabytes,
    number,
    one_line,
    ranks,
    rate,
    rate_key,
    scientific,
)
from lockstep.observe.notebook import kernel

Record = Mapping[str, Any]
Mode = Literal["auto", "live", "plain", "off"]

RECENT_STEPS = 20  # records that the time left is estimated from
MAX_METRICS = 2  # the task's own metrics on one line
WIDTH = 100  # columns at which a line of several parts is wrapped
# Keys of the summary that the last line shows. The others were shown at the start.
END_KEYS = ("step", "applied", "skipped", "seconds", "loss", "eval_loss", "eval_metrics", "best", "run_dir")


def open_display(mode: Mode, total_steps: int, unit: str, stream: TextIO) -> Display:
    """Return the display for this stream: `auto` is live on a terminal and in a notebook, and plain lines elsewhere."""
    if mode not in get_args(Mode):
        raise unknown_name("log.progress", mode, get_args(Mode))

    if mode == "off":
        return Display(total_steps, unit, stream)

    # Only the standard output of a kernel is the notebook: logs are files.
    if mode != "plain" and stream is sys.stdout and kernel.shell() is not None:
        from lockstep.observe.notebook.display import NotebookDisplay

        return NotebookDisplay(total_steps, unit, stream)

    obstacle = _why_not_live(stream)
    if mode != "plain" and obstacle is None:
        # rich is imported only where it is used.
        from lockstep.observe.live import LiveDisplay

        return LiveDisplay(total_steps, unit, stream)

    display = PlainDisplay(total_steps, unit, stream)
    if mode == "live":
        display.message(f"log.progress=live: {obstacle}; showing plain lines")

    return display


def _why_not_live(stream: TextIO) -> str | None:
    # stdout is None if it was closed before Python started; a file that was closed later raises ValueError.
    try:
        is_terminal = stream.isatty()
    except (AttributeError, ValueError):
        is_terminal = False

    # The live display moves the cursor and draws with characters that ASCII does not have.
    if not is_terminal:
        return "the output is not a terminal"

    if os.environ.get("TERM", "") in ("", "dumb"):
        return "this terminal cannot move its cursor"

    if "utf" not in (stream.encoding or "").lower():
        return f"this terminal takes {stream.encoding}, not UTF-8"

    return None


class Display:
    """Shows nothing (`log.progress=off`), and is the base of the other displays.

    One thread may call any method at any time, and none raises: a display is not worth a training run. The first
    failure is kept in `failure`, where a test can find it.
    """

    failure: Exception | None = None

    def __init__(self, total_steps: int, unit: str, stream: TextIO):
        self.total_steps = total_steps
        self.unit = unit

        # The newest records, and the figures that follow from them.
        self.start_event: Record = {}
        self.last: Record = {}
        self.seconds_left: float | None = None
        self._step_s: deque[float] = deque(maxlen=RECENT_STEPS)

        self._stream = stream

    def track(self, record: Record) -> None:
        """Keep the latest metrics and estimate the time left."""
        step = number(record.get("step"))
        step_s = number(record.get("step_s"))
        # The first record includes compilation and warm-up.
        if self.last and step_s is not None:
            self._step_s.append(step_s)

        # A median, because one recompilation or one stalled read must not spoil twenty estimates.
        if self._step_s and step is not None:
            self.seconds_left = max(0.0, self.total_steps - step) * statistics.median(self._step_s)

        self.last = record

    def start(self, start: Record) -> None:
        """Begin. `start` is the start event: task, world, device, precision, parameters."""

    def update(self, record: Record) -> None:
        """Show one record of metrics.jsonl."""

    def event(self, record: Record) -> None:
        """Show one record of events.jsonl."""

    def message(self, text: str) -> None:
        """Show a line of text."""

    def close(self) -> None:
        """End the display."""


def never_raises(method: Callable[..., None]) -> Callable[..., None]:
    """Keep the first failure of a display's method instead of raising it."""

    @wraps(method)
    def guarded(display: Display, *arguments: Any) -> None:
        try:
            method(display, *arguments)
        except Exception as error:
            # Whatever goes wrong with a terminal or a pipe, training must go on.
            display.failure = display.failure or error
            if isinstance(error, BrokenPipeError):
                point_at_null(display._stream)

    return guarded


class PlainDisplay(Display):
    """One line per record: for files, pipes and schedulers' logs."""

    @never_raises
    def start(self, start: Record) -> None:
        self.start_event = start
        self.message("  ".join(title_parts(start)))

    @never_raises
    def update(self, record: Record) -> None:
        self.track(record)
        self.message(step_line(self))

    @never_raises
    def event(self, record: Record) -> None:
        # The last line of a run says where its folder is.
        if record.get("event") == "end":
            record = {"run_dir": self.start_event.get("run_dir"), **record}

        # `start` already showed the start event.
        if record.get("event") != "start":
            self.message(event_line(record))

    @never_raises
    def message(self, text: str) -> None:
        # Characters that the stream cannot encode become question marks.
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(printable(text).encode(encoding, errors="replace").decode(encoding) + "\n")
        self._stream.flush()

    @never_raises
    def close(self) -> None:
        # The task may have printed since the last line, to a pipe that has broken.
        self._stream.flush()


# ---- lines ----


def title_parts(start: Record) -> list[str]:
    task, device, precision = (one_line(start.get(key, "-")) for key in ("task", "device", "precision"))
    return [task, ranks(start.get("world")), device, precision, f"{compact(start.get('parameters'))} parameters"]


def step_line(display: Display) -> str:
    """Return `step   120/400  loss  2.314  lr 1.0e-03  norm  0.831  57.6k token/s  mem  512 MB  eta 0:42`."""
    # Fixed widths align the numbers of consecutive lines.
    last = display.last
    total = str(display.total_steps)
    parts = [
        f"step {one_line(last.get('step', '-')):>{max(5, len(total))}}/{total}",
        f"loss {figures(last.get('loss'), 4):>6}",
        f"lr {scientific(last.get('lr')):>7}",
        f"norm {figures(last.get('grad_norm'), 3):>6}",
        f"{rate(last.get(rate_key(display.unit)), display.unit):>{len(display.unit) + 8}}",
        f"mem {megabytes(last.get('memory_mb')):>7}",
        f"eta {duration(display.seconds_left)}",
    ]

    # Parts that only some lines have come last.
    parts += [f"{name} {value}" for name, value in metric_parts(last)]
    if number(last.get("skipped")):
        parts.append(f"skipped {last['skipped']}")

    return "  ".join(parts)


def event_line(record: Record) -> str:
    """Return one line for any event. A sample keeps its line breaks, and the longest events are wrapped."""
    kind = one_line(record.get("event", "event"))
    if kind == "sample":
        return f"sample:\n{record.get('text', '-')}"

    if kind == "end":
        record = {key: record.get(key) for key in END_KEYS} | {"best": _best_words(record.get("best"))}

    # The kind has its own column.
    parts = [f"{kind:<7}", *event_words(record, leave_out=("time", "event", "traceback"))]
    return _wrapped(parts) if kind in ("checkpoint", "end") else "  ".join(parts).rstrip()


def _best_words(best: Any) -> str | None:
    """Return `eval_loss 0.2034 at step 30` for the best checkpoint, if the run kept one."""
    if not isinstance(best, Mapping):
        return None

    return f"{best.get('metric')} {figures(best.get('value'), 4)} at step {best.get('step')}"


def fact_lines(name: str, fact: str) -> str:
    """Return `  batch          global 8 (as asked) = ...`; further lines are indented like the fact."""
    head = f"  {name:14} "
    lines = textwrap.fill(
        fact,
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        # Paths are not broken, so that they can be copied.
        break_on_hyphens=False,
        break_long_words=False,
    )

    # An empty fact has no lines.
    return lines or head.rstrip()


def _wrapped(parts: list[str]) -> str:
    """Join the parts into lines of at most WIDTH columns, but never break a part."""
    lines = [parts[0]]

    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) <= WIDTH:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"{'':<7}  {part}")

    return "\n".join(lines)


def metric_parts(record: Record) -> list[tuple[str, str]]:
    """Return (name, value) of the task's first metrics; a line has no room for all of them."""
    metrics = record.get("metrics")
    if not isinstance(metrics, Mapping):
        return []

    return [(one_line(name), figures(value, 3)) for name, value in list(metrics.items())[:MAX_METRICS]]
