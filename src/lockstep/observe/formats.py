"""Numbers and text for people, the same on the terminal and in the report.

Every function takes anything that a record may hold and never raises: `-` stands for what is not a number,
and control characters are gone.
"""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Container, Mapping
from typing import Any

# ---- numbers ----


def number(value: Any) -> float | None:
    """`value` if it is a finite number."""
    if isinstance(value, str | bytes | bool):
        return None
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


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


SAMPLE = "sample"  # the unit of a task that names none


def rate_key(unit: str) -> str:
    """Which rate of a record is in `unit`: weights are in the task's own, if it has named one."""
    return "samples_per_s" if unit == SAMPLE else "weight_per_s"


def rate(per_second: Any, unit: str) -> str:
    return "-" if number(per_second) is None else f"{compact(per_second)} {unit}/s"


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


def ranks(world: Any) -> str:
    found = number(world)
    return "-" if found is None else f"{found:.0f} rank{'' if found == 1 else 's'}"


# ---- text ----


def printable(value: Any) -> str:
    """Text that cannot steer a terminal or break a page: `\ufffd` for control characters and surrogates."""
    text = str(value).replace("\r\n", "\n")
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs") else "\ufffd" for c in text)


def escaped(value: Any) -> str:
    """Text for a page: all that comes out of a file passes through here."""
    return html.escape(printable(value))


def one_line(value: Any, most: int = 160) -> str:
    text = " ".join(printable(value).split())
    return text if len(text) <= most else text[: most - 1] + "…"


MOST_WORDS = 2000


def event_words(record: Mapping[str, Any], leave_out: Container[str] = ()) -> list[str]:
    """What an event says, as `key value`; free text stands without its key, and None says nothing."""
    words: list[str] = []
    for key, value in record.items():
        if key in leave_out or value is None:
            continue
        if isinstance(value, Mapping):
            words += event_words(value)
        elif key in ("text", "message", "reason"):
            words.append(one_line(value, most=MOST_WORDS))  # what went wrong, and what to do, is not cut
        elif key == "seconds":
            seconds = number(value)
            words.append(f"{seconds:.1f} s" if seconds is not None and seconds < 60 else duration(value))
        else:
            shown = figures(value, 4) if isinstance(value, float) else one_line(value)
            words.append(f"{one_line(key)} {shown}")
    return words
