"""Sums without rounding: a float is a whole multiple of 2^-1074, and whole numbers have no order in which they are
added. Only the end result is rounded, once."""

from __future__ import annotations

import math

Exact = int | float  # a whole number of the smallest float; a float only if it is nan or infinite
UNIT = 1074  # 2^-1074 is the smallest float above 0


def exactly(value: float) -> Exact:
    if not math.isfinite(value):
        return value
    numerator, denominator = value.as_integer_ratio()  # the latter a power of two
    return numerator << (UNIT + 1 - denominator.bit_length())


def add(one: Exact, other: Exact) -> Exact:
    if isinstance(one, int) != isinstance(other, int):  # nothing finite changes what is not
        return other if isinstance(one, int) else one
    return one + other


def rounded(value: Exact) -> float:
    """The nearest float."""
    if isinstance(value, float):
        return value
    try:
        return value / (1 << UNIT)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def spelled(value: Exact) -> str:
    """For JSON, which may know no number of that size."""
    return repr(value) if isinstance(value, float) else f"{value:x}"


def read(text: str | float) -> Exact:
    """What `spelled` gave, or a plain float."""
    if isinstance(text, str):
        return float(text) if text in ("nan", "inf", "-inf") else int(text, 16)
    return exactly(float(text))
