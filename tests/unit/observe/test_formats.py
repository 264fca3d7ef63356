"""Numbers for people."""

from __future__ import annotations

import math

import pytest

from lockstep.observe import formats


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (42.4, "0:42"), (3723, "1:02:03"), (176_523, "2d 01:02:03"), (None, "-"), (math.nan, "-")],
)
def test_duration(seconds, text):
    assert formats.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (57600, "57.6k"),
        (999.7, "1k"),
        (0.25, "0.25"),
        (7.2e9, "7.2B"),
        (3e20, "3.0e+20"),
        ("x", "-"),
        (None, "-"),
    ],
)
def test_compact(value, text):
    assert formats.compact(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.3141, "2.314"),
        (12.341, "12.34"),
        (0.0123, "0.0123"),
        (0, "0.000"),
        (1.5e-7, "1.5e-07"),
        (2.5e9, "2.5e+09"),
        (-3.0, "-3.000"),
        (math.inf, "inf"),
        (10**400, "-"),
        (True, "-"),
    ],
)
def test_figures(value, text):
    assert formats.figures(value, 4) == text
