"""Numbers and text for people, the same on the terminal and in the report.

Every function takes anything that a record may hold and never raises: `-` stands for a value that is not a number,
and control characters are written as escapes.
"""

from __future__ import annotations

import functools
import html
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from lockstep.errors import printable

# The unit of a task that names none.
SAMPLE = "sample"

# ---- numbers ----


def number(value: Any) -> float | None:
    """Return `value` if it is a finite number."""
    # `float` would parse text and take True for 1.
    if isinstance(value, str | bytes | bool):
        return None

    # numpy scalars and tensors of one element are numbers as well.
    try:
        converted = float(value)
    except (TypeError, ValueError, OverflowError):
        return None

    return converted if math.isfinite(converted) else None


def _or_dash(write: Callable[..., str]) -> Callable[..., str]:
    """Make a formatter of finite numbers accept any value: it returns `-` for anything else."""

    @functools.wraps(write)
    def checked(value: Any, *arguments: Any) -> str:
        finite = number(value)
        return "-" if finite is None else write(finite, *arguments)

    return checked


def figures(value: Any, digits: int) -> str:
    """Return `digits` significant digits in a steady width: `2.314`, `12.34`, `0.0123`, `1.23e+06`, `nan`."""
    # A loss of nan is news, not a missing key.
    finite = number(value)
    if finite is None:
        return str(value) if isinstance(value, float) else "-"

    if finite == 0:
        return f"{0:.{digits - 1}f}"

    # Very small and very large numbers would need more columns than the others.
    exponent = math.floor(math.log10(abs(finite)))
    if not -3 <= exponent <= 5:
        return f"{finite:.{max(1, digits - 3)}e}"

    return f"{finite:.{min(4, max(0, digits - 1 - exponent))}f}"


@_or_dash
def scientific(value: float) -> str:
    return f"{value:.1e}"


@_or_dash
def compact(value: float) -> str:
    """Return three significant digits and a thousands suffix: `57.6k`, `1.05M`, `900`, `0.25`."""
    for suffix in ("", "k", "M", "B", "T"):
        # 999.5 would be shown as 1000.
        if abs(value) < 999.5:
            return f"{value:.3g}{suffix}"

        value /= 1000

    # There is no suffix for more than 999 T.
    return f"{value * 1e15:.1e}"


def rate_key(unit: str) -> str:
    """Return the key of the rate in `unit`. Loss weights count the task's own unit, if it names one."""
    return "samples_per_s" if unit == SAMPLE else "weight_per_s"


@_or_dash
def rate(per_second: float, unit: str) -> str:
    return f"{compact(per_second)} {unit}/s"


@_or_dash
def megabytes(value: float) -> str:
    # 10,000 MB would need another column.
    return f"{value:.0f} MB" if abs(value) < 9999.5 else f"{value / 1024:.1f} GB"


@_or_dash
def duration(seconds: float) -> str:
    """Return a time as `0:42`, `1:02:03` or `2d 01:02:03`."""
    # The time left may be estimated below 0.
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)

    # Leading units that are zero are left out.
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"

    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minutes}:{second:02}"


@_or_dash
def ranks(world: float) -> str:
    return "1 rank" if world == 1 else f"{world:.0f} ranks"


def escaped(value: Any) -> str:
    """Return text for a page. Everything that is read from a file passes through here."""
    return html.escape(printable(value))


def one_line(value: Any, most: int = 160) -> str:
    text = " ".join(printable(value).split())
    return text if len(text) <= most else text[: most - 1] + "…"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return a table for a terminal. Control characters and line breaks in a cell are escaped."""
    rows = [[printable(cell).replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = "  ".join(f"{{:{width}}}" for width in widths)
    return "\n".join(line.format(*row).rstrip() for row in rows)


def flat(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as a single one with dotted keys."""
    dotted: dict[str, Any] = {}

    for key, value in values.items():
        if isinstance(value, Mapping):
            dotted |= flat(value, f"{prefix}{key}.")
        else:
            dotted[f"{prefix}{key}"] = value

    return dotted


def finite(value: Any) -> Any:
    """Return a copy with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]

    return None if isinstance(value, float) and not math.isfinite(value) else value


def event_words(record: Mapping[str, Any], leave_out: Container[str] = ()) -> list[str]:
    """Return an event as a list of `key value`. Free text stands without its key; None and "" are left out."""
    words: list[str] = []
    for key, value in record.items():
        if key in leave_out or value is None or value == "":
            continue

        if isinstance(value, Mapping):
            words += event_words(value)
        elif isinstance(value, list):
            words.append(f"{one_line(key)} {one_line('; '.join(map(str, value)))}")
        elif key in ("text", "message", "reason"):
            # What went wrong, and what to do, must not be truncated early.
            words.append(one_line(value, most=2000))
        elif key == "seconds":
            seconds = number(value)
            words.append(f"{seconds:.1f} s" if seconds is not None and seconds < 60 else duration(value))
        else:
            words.append(f"{one_line(key)} {figures(value, 4) if isinstance(value, float) else one_line(value)}")

    return words
