"""What rank 0 shows on the terminal while it trains: a live display, plain lines, or nothing.

A display reads the records that also go to `metrics.jsonl` and `events.jsonl`; all it adds is the time left.
It never raises into training: a record without a key shows `-`, a closed terminal ends the output.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Literal, TextIO, get_args

from lockstep.errors import UserError
from lockstep.observe.plain import PlainDisplay, Record, Tracker

if TYPE_CHECKING:
    from lockstep.observe.live import LiveDisplay

Mode = Literal["auto", "live", "plain", "off"]


def make_progress(mode: Mode, total_steps: int, unit: str, stream: TextIO) -> Progress:
    """The display for this stream: `auto` is live on a terminal and plain lines everywhere else."""
    if mode not in get_args(Mode):
        raise UserError(f"log.progress={mode}", "no such display", "log.progress=auto, live, plain or off")
    if mode == "off":
        return Progress(None, stream)
    tracker, obstacle = Tracker(total_steps, unit), _why_not_live(stream)
    if mode != "plain" and obstacle is None:
        from lockstep.observe.live import LiveDisplay  # and rich with it, which nobody else needs

        return Progress(LiveDisplay(tracker, stream), stream)
    progress = Progress(PlainDisplay(tracker, stream), stream)
    if mode == "live":
        progress.message(f"log.progress=live: {obstacle}; showing plain lines")
    return progress


def _why_not_live(stream: TextIO) -> str | None:
    try:
        is_terminal = stream.isatty()
    except (AttributeError, ValueError):  # not a file (Python has None for a closed stdout), or closed
        is_terminal = False
    if not is_terminal:
        return "the output is not a terminal"
    if os.environ.get("TERM", "") in ("", "dumb"):
        return "this terminal cannot move its cursor"
    if "utf" not in (stream.encoding or "").lower():
        return f"this terminal takes {stream.encoding}, not UTF-8"
    return None


class Progress:
    """The terminal side of a run. Any call may come at any time, from one thread, and none raises.

    A display is not worth a training run: its first failure is kept in `failure` for whoever looks for it.
    """

    def __init__(self, display: PlainDisplay | LiveDisplay | None, stream: TextIO):
        self._display, self._stream = display, stream
        self.failure: Exception | None = None

    def start(self, facts: Record) -> None:
        """The run begins; `facts` is the start event: task, world, device, precision, parameters."""
        self._show("start", facts)

    def update(self, record: Record) -> None:
        """One record of metrics.jsonl."""
        self._show("update", record)

    def event(self, record: Record) -> None:
        """One record of events.jsonl."""
        self._show("event", record)

    def message(self, text: str) -> None:
        self._show("message", text)

    def close(self) -> None:
        self._show("close")

    def _show(self, method: str, *arguments: Any) -> None:
        if self._display is None:
            return
        try:
            getattr(self._display, method)(*arguments)
        except Exception as error:
            self.failure = self.failure or error
            if isinstance(error, BrokenPipeError):
                _point_at_null(self._stream)


def _point_at_null(stream: TextIO) -> None:
    """Let the process end with status 0: Python flushes stdout at exit, and a broken pipe gives 120."""
    with contextlib.suppress(OSError, ValueError):  # it has no descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
