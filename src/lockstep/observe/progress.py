"""What rank 0 shows on the terminal while it trains.

A display reads the records that also go to `metrics.jsonl` and `events.jsonl`; all it adds is the time left.
It never raises into training: a record without a key shows `-`, a closed terminal ends the output.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import statistics
import sys
import threading
import time
import unicodedata
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO

from lockstep.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

Mode = Literal["auto", "live", "plain", "off"]
Record = Mapping[str, Any]
Part = tuple[str, str, str]  # label, value, style

RECENT_STEPS = 20  # records the time left is estimated from
RECENT_LOSSES = 40  # width of the sparkline
SPARKS = "▁▂▃▄▅▆▇█"


class Progress(Protocol):
    """The terminal side of a run. Any method may be called at any time, in any order, from one thread."""

    def start(self, facts: Record) -> None:
        """The run begins; `facts` is the start event: task, world, device, precision, parameters, steps."""
        ...

    def update(self, record: Record) -> None:
        """One record of metrics.jsonl."""
        ...

    def event(self, record: Record) -> None:
        """One record of events.jsonl."""
        ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


def make_progress(mode: Mode, total_steps: int | None, unit: str, stream: TextIO) -> Progress:
    """The display for this stream: `auto` is live on a terminal and plain lines everywhere else."""
    if mode not in ("auto", "live", "plain", "off"):
        raise UserError(f"log.progress={mode}", "no such display", "log.progress=auto, live, plain or off")
    if mode == "off":
        return SilentProgress()
    obstacle = _why_not_live(stream)
    tracker, output = Tracker(total_steps, unit), SafeStream(stream)
    if mode != "plain" and obstacle is None:
        return Shielded(LiveProgress(tracker, output))
    progress = Shielded(PlainProgress(tracker, output))
    if mode == "live":
        progress.message(f"log.progress=live: {obstacle}; showing plain lines")
    return progress


def _why_not_live(stream: TextIO) -> str | None:
    try:
        is_terminal = stream.isatty()
    except (AttributeError, ValueError):  # not a file, or closed
        is_terminal = False
    if not is_terminal:
        return "the output is not a terminal"
    if os.environ.get("TERM", "") in ("", "dumb"):
        return "this terminal cannot move its cursor"
    if importlib.util.find_spec("rich") is None:
        return "the package rich is not installed"
    return None


# ---- what is known of the run so far ----


class Tracker:
    """The latest of everything, and the time left. No output here."""

    def __init__(self, total_steps: int | None, unit: str):
        self.total_steps, self.unit = total_steps, unit
        self.facts: Record = {}
        self.last: Record = {}
        self.last_eval: Record = {}
        self.losses: deque[float] = deque(maxlen=RECENT_LOSSES)
        self._step_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._warm = False

    def start(self, facts: Record) -> None:
        self.facts = facts
        if self.total_steps is None and (steps := number(facts.get("steps"))) is not None:
            self.total_steps = int(steps)

    def update(self, record: Record) -> None:
        self.losses.append(_any_float(record.get("loss")))
        self.last = record
        if self._warm and (step_s := number(record.get("step_s"))) is not None:
            self._step_s.append(step_s)
        self._warm = True  # the first record holds compilation and warm-up: no measure of what is to come

    def event(self, record: Record) -> None:
        if record.get("event") == "eval":
            self.last_eval = record

    @property
    def step(self) -> int | None:
        step = number(self.last.get("step"))
        return None if step is None else int(step)

    def seconds_left(self) -> float | None:
        """Steps left times the median of the recent step times; None when either is unknown.

        A median, because one recompilation or one stalled read must not spoil it for twenty records.
        """
        if not self._step_s or self.total_steps is None or self.step is None:
            return None
        return max(0, self.total_steps - self.step) * statistics.median(self._step_s)


# ---- the displays ----


class SilentProgress:
    def start(self, facts: Record) -> None:
        pass

    def update(self, record: Record) -> None:
        pass

    def event(self, record: Record) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class PlainProgress:
    """One line per record: for files, pipes and schedulers' logs."""

    def __init__(self, tracker: Tracker, stream: SafeStream):
        self._tracker, self._stream = tracker, stream
        self._started = False

    def start(self, facts: Record) -> None:
        self._started = True
        self._tracker.start(facts)
        self.message("  ".join(title_parts(facts)))

    def update(self, record: Record) -> None:
        self._tracker.update(record)
        self.message(step_line(self._tracker))

    def event(self, record: Record) -> None:
        self._tracker.event(record)
        if record.get("event") != "start":
            self.message(event_line(record))
        elif not self._started:
            self.start(record)

    def message(self, text: str) -> None:
        self._stream.write(printable(text) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


class LiveProgress:
    """A few lines at the bottom of the terminal, redrawn by rich's thread; all else scrolls above them."""

    def __init__(self, tracker: Tracker, stream: SafeStream):
        from rich.console import Console
        from rich.live import Live

        self._tracker, self._lock = tracker, threading.Lock()
        self._began = self._updated = time.monotonic()
        self._ended: float | None = None
        self._console = Console(file=stream)  # type: ignore[arg-type]
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=4,
            # Prints of the task scroll above the display, unless the user sent them to a file.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._open = False

    def start(self, facts: Record) -> None:
        with self._lock:
            self._tracker.start(facts)
        if not self._open:
            self._began = self._updated = time.monotonic()
            _restore_streams_in_children(self)
            self._live.start()
            self._open = True

    def update(self, record: Record) -> None:
        with self._lock:
            self._tracker.update(record)
            self._updated = time.monotonic()

    def event(self, record: Record) -> None:
        with self._lock:
            self._tracker.event(record)
        kind = record.get("event")
        if kind == "start":
            self.start(record)
        elif kind not in ("eval", "end"):  # the display itself shows what these say
            self.message(event_line(record))

    def message(self, text: str) -> None:
        # A Text, not a string: rich would read [brackets] in a string as its own markup.
        from rich.text import Text

        self._console.print(Text(printable(text)))

    def close(self) -> None:
        if self._open:
            self._open = False
            self._ended = time.monotonic()
            self._live.stop()

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        try:
            with self._lock:
                return Group(*self._lines())
        except Exception as error:  # in rich's thread, where raising ends the display
            return Text(f"(display: {error})", style="dim")

    def _lines(self) -> Iterable[RenderableType]:
        now = self._ended or time.monotonic()
        yield _one_line(title_parts(self._tracker.facts), style="bold")
        yield self._bar(now)
        if not self._tracker.last:
            yield _one_line([f"{spinner(now - self._began)} waiting for the first step"], style="dim")
            return
        yield _labelled(self._loss_parts())
        yield _labelled(self._optimizer_parts())
        yield _labelled(self._rate_parts())

    def _bar(self, now: float) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        tracker, step = self._tracker, self._tracker.step or 0
        left = tracker.seconds_left()
        if left is not None:  # the clock runs on between records
            left = max(0.0, left - (now - self._updated))
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_row(
            ProgressBar(total=tracker.total_steps, completed=step, pulse=tracker.total_steps is None),
            "  ".join(self._bar_words(step, tracker.total_steps, now - self._began, left)),
        )
        return row

    def _bar_words(self, step: int, total: int | None, elapsed: float, left: float | None) -> Iterable[str]:
        yield f"{step}/{total}" if total else f"step {step}"
        if total:
            yield f"{step / total:.0%}"
        yield f"{duration(elapsed)} elapsed"
        if total and self._ended is None:
            yield f"{duration(left)} left"

    def _loss_parts(self) -> Iterable[Part]:
        tracker = self._tracker
        yield "loss", figures(tracker.last.get("loss"), 4), "bold"
        yield "", sparkline(tracker.losses), "cyan"
        if tracker.last_eval:
            at = one_line(tracker.last_eval.get("step", "-"))
            yield "eval", f"{figures(tracker.last_eval.get('loss'), 4)} at {at}", "green"

    def _optimizer_parts(self) -> Iterable[Part]:
        last = self._tracker.last
        yield "lr", scientific(last.get("lr")), ""
        yield "norm", figures(last.get("grad_norm"), 3), ""
        if (scale := number(last.get("scale"))) is not None:
            yield "scale", f"{scale:g}", ""
        for name, value in metric_parts(last):
            yield name, value, ""
        if skipped := skipped_steps(last):
            yield "skipped", str(skipped), "yellow"

    def _rate_parts(self) -> Iterable[Part]:
        last = self._tracker.last
        for rate in rate_parts(last, self._tracker.unit):
            yield "", rate, ""
        yield "mem", megabytes(last.get("memory_mb")), ""
        if (share := data_wait_share(last)) is not None and share >= 0.05:
            yield "waiting for data", f"{share:.0%}", "yellow"


class Shielded:
    """Passes every call on and lets no exception out: a display is not worth a training run.

    The first failure is kept in `failure` for whoever looks for it.
    """

    def __init__(self, inner: Progress):
        self.inner = inner
        self.failure: Exception | None = None

    def _try(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:
            self.failure = self.failure or error

    def start(self, facts: Record) -> None:
        self._try(self.inner.start, facts)

    def update(self, record: Record) -> None:
        self._try(self.inner.update, record)

    def event(self, record: Record) -> None:
        self._try(self.inner.event, record)

    def message(self, text: str) -> None:
        self._try(self.inner.message, text)

    def close(self) -> None:
        self._try(self.inner.close)


class SafeStream:
    """A text stream that goes quiet when its other end is gone; `?` for what its encoding lacks."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.gone = False

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return not self.gone and self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        self._attempt(lambda: self._write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            self._stream.write(text.encode(self.encoding, errors="replace").decode(self.encoding))

    def _attempt(self, action: Callable[[], object]) -> None:
        if self.gone:
            return
        try:
            action()
        except BrokenPipeError:
            self.gone = True
            self._point_at_null()
        except (OSError, ValueError):  # an I/O error; a closed file
            self.gone = True

    def _point_at_null(self) -> None:
        """Let the process end with status 0: Python flushes stdout at exit, and a broken pipe gives 120."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


def _restore_streams_in_children(display: LiveProgress) -> None:
    """Give forked data workers the real stdout and stderr.

    While rich draws, it stands in for both and takes a lock to write. A worker forked while the drawing
    thread holds that lock would wait for it for ever at its first print.
    """
    alive, stdout, stderr = weakref.ref(display), sys.stdout, sys.stderr

    def restore() -> None:
        if (parent := alive()) is not None and parent._open:
            sys.stdout, sys.stderr = stdout, stderr

    os.register_at_fork(after_in_child=restore)


# ---- lines ----


def title_parts(facts: Record) -> list[str]:
    world = number(facts.get("world"))
    ranks = "-" if world is None else f"{world:.0f} rank{'' if world == 1 else 's'}"
    parts = [one_line(facts.get(key, "-")) for key in ("task", "device", "precision")]
    parts.insert(1, ranks)
    if (parameters := number(facts.get("parameters"))) is not None:
        parts.append(f"{compact(parameters)} parameters")
    return parts


def step_line(tracker: Tracker) -> str:
    """`step   120/400  loss  2.314  lr 1.0e-03  norm  0.83  57.6k token/s  mem 512 MB  eta 0:42`"""
    last, total = tracker.last, tracker.total_steps
    width = max(5, len(str(total or "")))
    step = "-" if tracker.step is None else tracker.step
    parts = [
        f"step {step:>{width}}" + (f"/{total}" if total else ""),
        f"loss {figures(last.get('loss'), 4):>6}",
        f"lr {scientific(last.get('lr')):>7}",
        f"norm {figures(last.get('grad_norm'), 3):>6}",
        f"{rate_parts(last, tracker.unit)[0]:>{len(tracker.unit) + 8}}",
        f"mem {megabytes(last.get('memory_mb')):>7}",
        f"eta {duration(tracker.seconds_left())}",
    ]
    parts += [f"{name} {value}" for name, value in metric_parts(last)]
    if skipped := skipped_steps(last):
        parts.append(f"skipped {skipped}")
    return "  ".join(parts)


def event_line(record: Record) -> str:
    """One line for any event; a sample keeps the line breaks of its text."""
    kind = one_line(record.get("event", "event"))
    if kind == "sample":
        return f"sample:\n{record.get('text', '-')}"
    words = [f"{kind:<7}"]
    for key, value in record.items():
        if key in ("time", "event"):
            continue
        words += _event_words(key, value)
    return "  ".join(words).rstrip()


def _event_words(key: str, value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [word for inner, item in value.items() for word in _event_words(str(inner), item)]
    if key == "seconds":
        seconds = number(value)
        return [f"{seconds:.1f} s" if seconds is not None and seconds < 60 else duration(value)]
    if key in ("text", "message", "reason"):
        return [one_line(value)]
    shown = figures(value, 4) if isinstance(value, float) else one_line(value)
    return [f"{one_line(key)} {shown}"]


def metric_parts(record: Record, most: int = 2) -> list[tuple[str, str]]:
    """The task's own metrics, the first few: a line has an end."""
    metrics = record.get("metrics")
    if not isinstance(metrics, Mapping):
        return []
    return [(one_line(name), figures(value, 3)) for name, value in list(metrics.items())[:most]]


def rate_parts(record: Record, unit: str) -> list[str]:
    rates = [f"{compact(record.get('weight_per_s'))} {unit}/s"]
    if unit != "sample":
        rates.append(f"{compact(record.get('samples_per_s'))} sample/s")
    return rates


def skipped_steps(record: Record) -> int:
    return int(number(record.get("skipped")) or 0)


def data_wait_share(record: Record) -> float | None:
    wait, step = number(record.get("data_wait_s")), number(record.get("step_s"))
    return wait / step if wait is not None and step else None


def sparkline(values: Iterable[float]) -> str:
    """Recent values as bars, the lowest to the highest of them; `!` where a value is not finite."""
    values = list(values)
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    top = len(SPARKS) - 1

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return "!"
        # Halved first: the difference of two huge numbers may overflow.
        return SPARKS[round((value / 2 - low / 2) / (high / 2 - low / 2) * top) if high > low else top // 2]

    return "".join(bar(value) for value in values)


def spinner(seconds: float) -> str:
    return "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"[int(seconds * 4) % 10]


def _one_line(parts: Iterable[str], style: str = "") -> Text:
    from rich.text import Text

    return Text(" · ".join(parts), style=style, no_wrap=True, overflow="ellipsis")


def _labelled(parts: Iterable[Part]) -> Text:
    from rich.text import Text

    line = Text(no_wrap=True, overflow="ellipsis")
    for index, (label, value, style) in enumerate(parts):
        line.append("   " if index else "")
        line.append(f"{label} " if label else "", style="dim")
        line.append(value, style=style)
    return line


# ---- numbers for people; every one of these takes anything and gives `-` for what is not a number ----


def number(value: Any) -> float | None:
    """`value` if it is a finite number."""
    value = _any_float(value)
    return value if math.isfinite(value) else None


def _any_float(value: Any) -> float:
    if isinstance(value, str | bytes | bool):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def figures(value: Any, digits: int) -> str:
    """That many significant digits in a steady width: `2.314`, `12.34`, `0.0123`, `1.23e+06`, `nan`."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # a loss of nan is news, not a missing key
    found = number(value)
    if found is None:
        return "-"
    if found == 0:
        return f"{0:.{digits - 1}f}"
    exponent = math.floor(math.log10(abs(found)))
    if not -3 <= exponent <= 5:
        return f"{found:.{max(1, digits - 3)}e}"
    return f"{found:.{min(4, max(0, digits - 1 - exponent))}f}"


def scientific(value: Any) -> str:
    found = number(value)
    return "-" if found is None else f"{found:.1e}"


def compact(value: Any) -> str:
    """Three significant digits and a thousands suffix: `57.6k`, `1.05M`, `900`, `0.25`."""
    found = number(value)
    if found is None:
        return "-"
    for suffix in ("", "k", "M", "B", "T"):
        if abs(found) < 999.5:
            return f"{found:.3g}{suffix}"
        found /= 1000
    return f"{found * 1e15:.1e}"


def megabytes(value: Any) -> str:
    found = number(value)
    if found is None:
        return "-"
    return f"{found:.0f} MB" if abs(found) < 9999.5 else f"{found / 1024:.1f} GB"


def duration(seconds: Any) -> str:
    """`0:42`, `1:02:03`, `2d 01:02:03`."""
    found = number(seconds)
    if found is None:
        return "-"
    minutes, second = divmod(max(0, round(found)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minutes}:{second:02}"


def printable(text: Any) -> str:
    """Text that cannot steer the terminal: `\ufffd` for control characters other than newline and tab."""
    text = str(text).replace("\r\n", "\n")
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs") else "\ufffd" for c in text
    )


def one_line(value: Any, most: int = 160) -> str:
    text = " ".join(printable(value).split())
    return text if len(text) <= most else text[: most - 1] + "…"
