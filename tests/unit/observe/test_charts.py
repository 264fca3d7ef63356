"""Charts: curves go where their values say, and any numbers make one."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lockstep.observe.charts import Series, line_chart, moving_average, round_ticks, thinned, tick_labels


def parse(svg: str) -> ET.Element:
    """The tree of a chart, after checking that nothing is drawn outside its picture."""
    root = ET.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for element in root.iter():
        for key, limit in (
            ("x", width),
            ("x1", width),
            ("x2", width),
            ("cx", width),
            ("y", height),
            ("cy", height),
        ):
            if key in element.attrib:
                assert -0.1 <= float(element.attrib[key]) <= limit + 0.1, (element.tag, element.attrib)
        for x, y in re.findall(r"[ML]([-\d.a-z]+) ([-\d.a-z]+?)(?=[LMl]|$)", element.attrib.get("d", "")):
            assert 0 <= float(x) <= width, element.attrib["d"]
            assert 0 <= float(y) <= height, element.attrib["d"]
    return root


def having(root: ET.Element, style: str) -> list[ET.Element]:
    return [element for element in root.iter() if style in element.attrib.get("class", "").split()]


def labels(root: ET.Element, axis: str) -> list[str]:
    return [element.text or "" for element in having(root, "tick") if axis in element.attrib["class"].split()]


def test_a_curve_goes_where_its_values_say():
    root = parse(line_chart([Series("loss", [(0, 0.0), (50, 5.0), (100, 10.0)])], "Loss", "nat"))
    assert labels(root, "y") == ["0", "2", "4", "6", "8", "10"]
    assert labels(root, "x") == ["0", "20", "40", "60", "80", "100"]
    (path,) = having(root, "line")
    points = [tuple(map(float, pair.split())) for pair in re.findall(r"[ML]([\d.]+ [\d.]+)", path.attrib["d"])]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
    assert y2 < y0, "up is up"
    titles = [element.findtext("{*}title") for element in having(root, "hover")]
    assert titles == ["step 0: loss 0 nat", "step 50: loss 5 nat", "step 100: loss 10 nat"]


def test_a_nan_is_a_gap_with_a_mark():
    ys = [1.0, 2.0, math.nan, 3.0, math.inf, 4.0]
    root = parse(line_chart([Series("loss", list(enumerate(ys)))], "Loss"))
    assert having(root, "line")[0].attrib["d"].count("M") == 3, "three strokes around two gaps"
    assert [mark.findtext("{*}title") for mark in having(root, "mark")] == [
        "step 2: loss nan",
        "step 4: loss inf",
    ]


@pytest.mark.parametrize("ys", [[], [math.nan], [math.nan, math.inf, 1.7e308]])
def test_no_values_are_said(ys):
    root = parse(line_chart([Series("loss", list(enumerate(ys)))], "Loss"))
    assert having(root, "empty")[0].text == "no values"


@pytest.mark.parametrize(
    ("ys", "expected"),
    [
        ([3.0], ["1", "2", "3", "4", "5"]),
        ([0.0, 0.0], ["-1.0", "-0.5", "0", "0.5", "1.0"]),
        ([1e-5, 1e-5], ["0.5e-5", "1.0e-5", "1.5e-5"]),
        ([2e6, 3e6], ["2.0M", "2.2M", "2.4M", "2.6M", "2.8M", "3.0M"]),
        ([0.0, 25_000.0], ["0", "5k", "10k", "15k", "20k", "25k"]),
        ([3e-4, 5e-4], ["3.0e-4", "3.5e-4", "4.0e-4", "4.5e-4", "5.0e-4"]),
        ([-2.0, 2.0], ["-2", "-1", "0", "1", "2"]),
        ([0.0, 2e20], ["0", "0.5e20", "1.0e20", "1.5e20", "2.0e20"]),
        ([-1e290, 1e290], None),
        ([1e290], None),
        ([1e-290], None),
        ([5e-324], ["-1.0", "-0.5", "0", "0.5", "1.0"]),
        ([1e12, 1e12 + 1], None),
    ],
)
def test_y_ticks(ys, expected):
    root = parse(line_chart([Series("loss", list(enumerate(ys)))], "Loss"))
    found = labels(root, "y")
    assert len(set(found)) == len(found) >= 2
    assert expected is None or found == expected


def test_a_wide_range_is_logarithmic_and_a_scale_counts_in_twos():
    root = parse(line_chart([Series("norm", [(1, 0.05), (2, 3.0), (3, 800.0)])], "Norm", log=10))
    assert labels(root, "y") == ["0.01", "0.1", "1", "10", "100", "1000"]
    assert "log scale" in "".join(root.itertext())
    narrow = parse(line_chart([Series("norm", [(1, 0.5), (2, 3.0)])], "Norm", log=10))
    assert "log scale" not in "".join(narrow.itertext())
    scale = parse(line_chart([Series("scale", [(1, 1024.0), (2, 4096.0)])], "Scale", log=2))
    assert labels(scale, "y") == ["2¹⁰", "2¹¹", "2¹²"]


NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


STYLES = st.sampled_from(["line", "smooth", "points", "marks"])


@settings(max_examples=150, deadline=None)
@given(ys=st.lists(NUMBERS, max_size=12), style=STYLES, zero=st.booleans(), log=st.sampled_from([None, 2, 10]))
def test_any_numbers_make_a_chart(ys, style, zero, log):
    points = [(7 * index, y) for index, y in enumerate(ys)]
    parse(line_chart([Series("y", points, style)], "Any", zero=zero, log=log))


@settings(max_examples=150, deadline=None)
@given(low=st.floats(-1e12, 1e12), span=st.floats(1e-6, 1e12))
def test_ticks_are_round_inside_and_distinct(low, span):
    assume(span > 1e-6 * abs(low))
    high = low + span
    ticks = round_ticks(low, high, 5)
    assert 2 <= len(ticks) <= 6
    assert all(low - 1e-6 * span <= tick <= high + 1e-6 * span for tick in ticks)
    assert len(set(tick_labels(ticks))) == len(ticks)


def test_a_long_run_keeps_its_peaks_in_few_points():
    ys = [1.0] * 100_000
    ys[54_321], ys[77_777] = 99.0, math.nan
    points = list(enumerate(ys))
    kept = thinned(points, 600)
    assert len(kept) < 1000
    assert (54_321, 99.0) in kept
    assert any(math.isnan(y) for _, y in kept)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert len(line_chart([Series("y", points)], "Long")) < 60_000


def averages(*ys: float, half: int) -> list[float]:
    return [y for _, y in moving_average(list(enumerate(ys)), half)]


def test_smoothing_keeps_level_gaps_and_the_first_value():
    flat = averages(*[2.0] * 5, math.nan, *[2.0] * 5, half=3)
    assert math.isnan(flat[5])
    assert [value for value in flat if not math.isnan(value)] == [2.0] * 10
    assert averages(9.0, 3.0, 3.0, 3.0, 6.0, half=1) == [9.0, 5.0, 3.0, 4.0, 4.5]


def test_many_points_are_smoothed_and_the_tooltips_tell_the_values_themselves():
    root = parse(line_chart([Series("loss", [(x, x % 2) for x in range(120)], "smooth")], "Loss"))
    assert len(having(root, "raw")) == len(having(root, "line")) == 1
    titles = [hover.findtext("{*}title") for hover in having(root, "hover")]
    assert titles[-2:] == ["step 118: loss 0", "step 119: loss 1"]
    few = parse(line_chart([Series("loss", [(x, x % 2) for x in range(12)], "smooth")], "Loss"))
    assert not having(few, "raw")


def test_several_series_have_a_legend_and_marks_stand_on_the_axis():
    skips = Series("skipped step", [(1, math.nan)], "marks")
    series = [Series("train", [(0, 1.0), (2, 2.0)]), Series("<eval>", [(2, 1.5)], "points"), skips]
    root = parse(line_chart([*series, Series("absent", [])], "Loss"))
    assert "".join(having(root, "legend")[0].itertext()) == "● train\u2003● <eval>\u2003▼ skipped step"
    assert [mark.findtext("{*}title") for mark in having(root, "mark")] == ["step 1: skipped step"]
    assert len(having(root, "dot")) == 1
    assert not having(parse(line_chart(series[:1], "Loss")), "legend")
