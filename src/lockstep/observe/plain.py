"""Progress as plain lines: what is known of the run so far, and how one record of it reads."""

from __future__ import annotations

import statistics
import textwrap
from collections import deque
from collections.abc import Mapping
from typing import Any, TextIO

from lockstep.observe.formats import (
    compact,
    duration,
    event_words,
    figures,
    megabytes,
    number,
    one_line,
    printable,
    ranks,
    rate,
    rate_key,
    scientific,
)

Record = Mapping[str, Any]

RECENT_STEPS = 20  # records the time left is estimated from
MOST_METRICS = 2  # on one line
WIDTH = 100  # columns of a line that is made of several parts, where they fit
BROKEN = ("checkpoint", "end")  # events whose lines are broken too: long ones in every run
END_KEYS = ("step", "applied", "skipped", "seconds", "loss", "eval_loss", "eval_metrics", "run_dir")


class Tracker:
    """The latest of everything, and the time left. No output here."""

    def __init__(self, total_steps: int, unit: str):
        self.total_steps, self.unit = total_steps, unit
        self.facts: Record = {}
        self.last: Record = {}
        self.last_eval: Record = {}
        self.seconds_left: float | None = None
        self._step_s: deque[float] = deque(maxlen=RECENT_STEPS)

    def update(self, record: Record) -> None:
        step, step_s = number(record.get("step")), number(record.get("step_s"))
        if self.last and step_s is not None:  # the first record holds compilation and warm-up
            self._step_s.append(step_s)
        if self._step_s and step is not None:
            # A median, because one recompilation or one stalled read must not spoil it for twenty records.
            self.seconds_left = max(0.0, self.total_steps - step) * statistics.median(self._step_s)
        self.last = record

    def event(self, record: Record) -> None:
        if record.get("event") == "eval":
            self.last_eval = record


class PlainDisplay:
    """One line per record: for files, pipes and schedulers' logs."""

    def __init__(self, tracker: Tracker, stream: TextIO):
        self._tracker, self._stream = tracker, stream

    def start(self, facts: Record) -> None:
        self._tracker.facts = facts
        self.message("  ".join(title_parts(facts)))

    def update(self, record: Record) -> None:
        self._tracker.update(record)
        self.message(step_line(self._tracker))

    def event(self, record: Record) -> None:
        self._tracker.event(record)
        if record.get("event") == "end":
            record = {"run_dir": self._tracker.facts.get("run_dir"), **record}
        if record.get("event") != "start":  # `start` has shown that one
            self.message(event_line(record))

    def message(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        line = printable(text).encode(encoding, errors="replace").decode(encoding)
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


def title_parts(facts: Record) -> list[str]:
    task, device, precision = (one_line(facts.get(key, "-")) for key in ("task", "device", "precision"))
    return [task, ranks(facts.get("world")), device, precision, f"{compact(facts.get('parameters'))} parameters"]


def step_line(tracker: Tracker) -> str:
    """`step   120/400  loss  2.314  lr 1.0e-03  norm  0.831  57.6k token/s  mem  512 MB  eta 0:42`"""
    last, total = tracker.last, str(tracker.total_steps)
    parts = [
        f"step {one_line(last.get('step', '-')):>{max(5, len(total))}}/{total}",
        f"loss {figures(last.get('loss'), 4):>6}",
        f"lr {scientific(last.get('lr')):>7}",
        f"norm {figures(last.get('grad_norm'), 3):>6}",
        f"{rate(last.get(rate_key(tracker.unit)), tracker.unit):>{len(tracker.unit) + 8}}",
        f"mem {megabytes(last.get('memory_mb')):>7}",
        f"eta {duration(tracker.seconds_left)}",
    ]
    parts += [f"{name} {value}" for name, value in metric_parts(last)]
    if number(last.get("skipped")):
        parts.append(f"skipped {last['skipped']}")
    return "  ".join(parts)


def event_line(record: Record) -> str:
    """One line for any event; a sample keeps the line breaks of its text."""
    kind = one_line(record.get("event", "event"))
    if kind == "sample":
        return f"sample:\n{record.get('text', '-')}"
    if kind == "end":  # the rest of the summary was said at the start
        record = {key: record.get(key) for key in END_KEYS}
    parts = [f"{kind:<7}", *event_words(record, leave_out=("time", "event", "traceback"))]
    return _broken(parts) if kind in BROKEN else "  ".join(parts).rstrip()


def fact_lines(name: str, fact: str) -> str:
    """`  batch          global 8 (as asked) = ...`, and on further lines what does not fit."""
    head = f"  {name:14} "
    further = " " * len(head)
    return (
        textwrap.fill(  # a path stays whole, to be copied
            fact, WIDTH, initial_indent=head, subsequent_indent=further, break_on_hyphens=False, break_long_words=False
        )
        or head.rstrip()
    )


def _broken(parts: list[str]) -> str:
    """Parts in lines of at most WIDTH columns; no part is broken."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) <= WIDTH:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"{'':<7}  {part}")
    return "\n".join(lines)


def metric_parts(record: Record) -> list[tuple[str, str]]:
    """The first few of the task's own metrics: a line has an end."""
    metrics = record.get("metrics")
    if not isinstance(metrics, Mapping):
        return []
    return [(one_line(name), figures(value, 3)) for name, value in list(metrics.items())[:MOST_METRICS]]
