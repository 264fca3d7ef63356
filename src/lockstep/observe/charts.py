"""Line charts over steps, as inline SVG: no script, no library.

Any numbers make a chart. A value that is not finite is a gap in its line and a triangle on the x axis.
Sizes are in the units of the picture. Room for text is planned for phones, where pictures are scaled down and the style
sheet enlarges their text to keep it legible.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.observe.formats import escaped

Point = tuple[float, float]
Style = Literal["line", "smooth", "points", "marks"]

MAX_POINTS = 600  # per drawn line: more than the pixels of a chart only costs bytes
MAX_HOVERS = 150  # per series: each is an invisible circle that carries a tooltip
CHARACTER = 9  # room for one character
RIGHT, TOP, BOTTOM = 14, 44, 30  # margins; the left one depends on the labels
WIDE = (1040, 340)  # (width, height)
NARROW = (510, 240)
# (smallest value, unit of its labels, suffix): 5000 is easier to read than 5k.
UNITS = ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k"), (0.0, 1.0, ""))


@dataclass
class Series:
    """Points of one colour, in the order of their steps.

    `smooth` is a faint line with its moving average over it, `points` are dots joined by a dashed line, and `marks`
    are triangles on the x axis, whose values do not matter.
    """

    name: str
    points: Sequence[Point]
    style: Style = "line"

    def __post_init__(self) -> None:
        self.points = [(x, _representable(y)) for x, y in self.points if math.isfinite(x)]


def _representable(value: float) -> float:
    # An axis that reached further would overflow.
    if abs(value) > 1e290:
        return math.inf

    return 0.0 if abs(value) < 1e-290 else value


@dataclass(frozen=True)
class Axis:
    """Maps values to coordinates in the picture."""

    low: float
    high: float
    start: float  # the coordinate of `low`
    end: float  # the coordinate of `high`
    ticks: Sequence[float]
    labels: Sequence[str]
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)

        return self.start + (value - low) / (high - low) * (self.end - self.start)


def line_chart(
    series: Sequence[Series],
    title: str,
    unit: str = "",
    *,
    zero: bool = False,
    log: Literal[2, 10] | None = None,
    wide: bool = False,
) -> str:
    """Return an SVG of these series.

    `zero` starts the y axis at 0. `log=10` makes it logarithmic where the values are positive and span more
    than two decades, `log=2` counts in powers of two.
    """
    width, height = WIDE if wide else NARROW

    ys = [y for curve in series for _, y in curve.points if math.isfinite(y)]

    # Nothing finite to show: an empty chart with its title.
    if not ys:
        body = f'<text class="empty" x="{width / 2}" y="{height / 2}">no values</text>'
        return _frame(body, title, unit, width, height)

    # Two decades fit a linear axis well.
    if log and min(ys) > 0 and (log == 2 or max(ys) / min(ys) > 100):
        y_axis = _log_axis(ys, height - BOTTOM, TOP, log)
    else:
        y_axis = _linear_axis(ys, height - BOTTOM, TOP, zero)

    # The labels of the y axis decide how much room is left for the curves.
    left = 12 + CHARACTER * max(4, *map(len, y_axis.labels))
    x_axis = _step_axis([x for curve in series for x, _ in curve.points], left, width - RIGHT)

    curves = "".join(_draw(curve, x_axis, y_axis, unit) for curve in series)
    aside = ", ".join(word for word in (unit, "log scale" if y_axis.log else "") if word)
    return _frame(_grid(x_axis, y_axis) + curves + _legend(series, width), title, aside, width, height)


# ---- parts of the picture ----


def _frame(body: str, title: str, aside: str, width: int, height: int) -> str:
    size = " wide" if width == WIDE[0] else ""
    return (
        f'<svg class="chart{size}" xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{escaped(title)}">'
        f'<text class="title" x="4" y="18">{escaped(title)}'
        f'<tspan class="unit" dx="7">{escaped(aside)}</tspan></text>{body}</svg>'
    )


def _legend(series: Sequence[Series], width: int) -> str:
    shown = [curve for curve in series if curve.points]
    if len(shown) < 2:
        return ""

    words = [
        f'<tspan class="{curve.style}">{"▼" if curve.style == "marks" else "●"}</tspan> {escaped(curve.name)}'
        for curve in shown
    ]
    # An em space is wide enough to tell the names apart.
    return f'<text class="legend" x="{width - RIGHT}" y="18">' + "\u2003".join(words) + "</text>"


def _grid(x_axis: Axis, y_axis: Axis) -> str:
    left, right = x_axis.start, x_axis.end
    base = y_axis.start
    parts = []

    for tick, label in zip(y_axis.ticks, y_axis.labels, strict=True):
        y = y_axis(tick)
        parts.append(f'<line class="rule" x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="y tick" x="{left - 7:.1f}" y="{y + 4:.1f}">{label}</text>')

    # The axis of the steps.
    parts.append(f'<line class="axis" x1="{left:.1f}" x2="{right:.1f}" y1="{base:.1f}" y2="{base:.1f}"/>')
    parts.append(f'<text x="4" y="{base + 20:.1f}">step</text>')

    for tick, label in zip(x_axis.ticks, x_axis.labels, strict=True):
        x = x_axis(tick)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base:.1f}" y2="{base + 4:.1f}"/>')
        # The last label must not leave the picture.
        inside = min(x, right + 10 - CHARACTER / 2 * len(label))
        parts.append(f'<text class="x tick" x="{inside:.1f}" y="{base + 20:.1f}">{label}</text>')

    return "".join(parts)


def _draw(series: Series, x_axis: Axis, y_axis: Axis, unit: str) -> str:
    lines = [("points" if series.style == "points" else "line", series.points)]
    # A short curve is not smoothed: there is nothing to see in an average of it.
    half = min(25, len(series.points) // 60) if series.style == "smooth" else 0
    if half:
        lines = [("raw", series.points), ("line", moving_average(series.points, half))]

    return "".join(
        f'<path class="{style}" d="{_path(points, x_axis, y_axis)}"/>' for style, points in lines
    ) + _tooltips(series, x_axis, y_axis, unit)


def _path(points: Sequence[Point], x_axis: Axis, y_axis: Axis) -> str:
    """Return one stroke per run of finite values. A lone value is a stroke of length 0, which is drawn as a dot."""
    strokes: list[str] = []
    pen_down = False

    for x, y in thinned(points, MAX_POINTS):
        if math.isfinite(y):
            at = f"{x_axis(x):.1f} {y_axis(y):.1f}"
            strokes.append(f"L{at}" if pen_down else f"M{at}l0 0")

        pen_down = math.isfinite(y)

    return "".join(strokes)


def _tooltips(series: Series, x_axis: Axis, y_axis: Axis, unit: str) -> str:
    """Return a circle for each finite value, invisible unless it is a dot, and a triangle for each other value."""
    style, radius = ("dot", 4) if series.style == "points" else ("hover", 7)
    suffix = f" {escaped(unit)}" if unit else ""

    def title(x: float, y: float) -> str:
        value = "" if series.style == "marks" else f" {y:.4g}{suffix}"
        return f"<title>step {x:.0f}: {escaped(series.name)}{value}</title>"

    circles = [
        f'<circle class="{style}" cx="{x_axis(x):.1f}" cy="{y_axis(y):.1f}" r="{radius}">{title(x, y)}</circle>'
        for x, y in _spread([point for point in series.points if math.isfinite(point[1])])
    ]
    triangles = [
        f'<path class="mark" d="M{x_axis(x):.1f} {y_axis.start:.1f}l-4 -8h8z">{title(x, y)}</path>'
        for x, y in _spread([point for point in series.points if not math.isfinite(point[1])])
    ]
    return "".join(circles + triangles)


def _spread(points: list[Point]) -> list[Point]:
    """Return at most MAX_HOVERS evenly spaced points, including the last one."""
    every = math.ceil(len(points) / MAX_HOVERS) or 1
    return points[::-1][::every][::-1]


# ---- fewer points ----


def thinned(points: Sequence[Point], most: int) -> Sequence[Point]:
    """Return about `most` points that keep every peak and gap: the lowest, the highest and a gap of each bucket."""
    if len(points) <= most:
        return points

    # A bucket yields two points, or three if it has a gap.
    size = math.ceil(2 * len(points) / most)

    extremes: list[Point] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]

        finite = sorted((y, x) for x, y in bucket if math.isfinite(y))
        gap = [point for point in bucket if not math.isfinite(point[1])][:1]

        extremes += sorted({*gap, *((x, y) for y, x in (*finite[:1], *finite[-1:]))})

    return extremes


def moving_average(points: Sequence[Point], half: int) -> list[Point]:
    """Replace each finite value by the mean of the finite values among it and up to `half` neighbours on each side.

    Near the start the window is narrower on both sides, because a curve that starts steeply must not be flattened
    there; at the far end it only runs out of right-hand neighbours.
    """
    averages = []
    for index, (x, y) in enumerate(points):
        near = min(half, index)

        window = [value for _, value in points[index - near : index + near + 1] if math.isfinite(value)]
        averages.append((x, math.fsum(window) / len(window) if math.isfinite(y) else math.nan))

    return averages


# ---- axes ----


def _step_axis(xs: Sequence[float], start: float, end: float) -> Axis:
    low, high = min(xs), max(xs)
    # A single step gets some room on both sides.
    if low == high:
        low, high = low - 1, high + 1
    elif 0 < low <= 0.05 * high:
        low = 0.0  # a run that was logged from early on

    ticks = round_ticks(low, high, 8 if end > NARROW[0] else 5)
    # There is no step 1.5.
    ticks = [tick for tick in ticks if tick == round(tick)] or ticks
    return Axis(low, high, start, end, ticks, tick_labels(ticks))


def _linear_axis(ys: Sequence[float], start: float, end: float, zero: bool) -> Axis:
    low, high = min(ys), max(ys)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)

    # A constant gets half its own size above and below.
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = abs(high) / 2 or 1.0
        low, high = low - room, high + room

    ticks = round_ticks(low, high, 5)
    gap = ticks[1] - ticks[0]

    # A curve that goes well beyond the outermost tick gets one more, so that it lies between labelled lines.
    if high - ticks[-1] > 0.4 * gap:
        ticks = [*ticks, ticks[-1] + gap]

    if ticks[0] - low > 0.4 * gap:
        ticks = [ticks[0] - gap, *ticks]

    return Axis(min(low, ticks[0]), max(high, ticks[-1]), start, end, ticks, tick_labels(ticks))


def _log_axis(ys: Sequence[float], start: float, end: float, base: int) -> Axis:
    # The 1e-9 absorbs rounding, so that an exact power of the base adds no empty decade.
    low = math.floor(math.log(min(ys), base) + 1e-9)
    high = math.ceil(math.log(max(ys), base) - 1e-9)
    if low == high:
        low, high = low - 1, high + 1

    # At most seven labels.
    powers = range(low, high + 1, math.ceil((high - low) / 6))
    ticks = [float(base) ** power for power in powers]

    # Powers of two are labelled as such; others as plain numbers.
    if base == 2:
        raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
        labels = ["2" + str(power).translate(raised) for power in powers]
    else:
        labels = [tick_labels([tick])[0] for tick in ticks]

    return Axis(float(base) ** low, float(base) ** high, start, end, ticks, labels, log=True)


def round_ticks(low: float, high: float, about: int) -> list[float]:
    """Return the multiples of 1, 2 or 5 times a power of ten in [low, high]: at least 2, at most `about` + 1."""
    span = high - low
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next((size * power for size in (1, 2, 5) if span / (size * power) <= about), 10 * power)
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Return labels with one unit and just enough digits to tell the ticks of an axis apart."""
    size = max(map(abs, ticks))
    gap = min((b - a for a, b in itertools.pairwise(ticks)), default=size)

    # Beyond T, and for small values, an exponent takes the place of the suffix.
    if 1e-3 <= size < 1e15:
        unit, suffix = next((unit, suffix) for least, unit, suffix in UNITS if size >= least)
    else:
        exponent = math.floor(math.log10(size) + 1e-9)
        unit, suffix = 10.0**exponent, f"e{exponent}"

    # The 1e-9 absorbs rounding: the log of an exact power of ten may come out just below it.
    decimals = min(12, max(0, -math.floor(math.log10(gap / unit) + 1e-9)))
    return [f"{tick / unit:.{decimals}f}{suffix}" if tick else "0" for tick in ticks]
