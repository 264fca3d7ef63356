"""Curves without axes: a line of text, or a small inline SVG that needs no style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lockstep.observe.charts import MAX_POINTS, Point, thinned
from lockstep.observe.formats import escaped, figures

BARS = "▁▂▃▄▅▆▇█"
WIDTH, HEIGHT = 460, 120  # the size of the SVG, in its own units
COLOURS = ("#3f51b5", "#2e9e5b", "#c2662d", "#8e44ad")  # the colours of the curves, in order


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return one character for each value, or for each of `width` equal parts, by its mean. A gap is not finite."""
    # Values are cut into parts of equal size, the last one shorter.
    size = max(1, math.ceil(len(values) / width))
    parts = [values[start : start + size] for start in range(0, len(values), size)]

    means = []

    for part in parts:
        finite = [value for value in part if math.isfinite(value)]
        means.append(math.fsum(finite) / len(finite) if finite else math.nan)

    # From the smallest mean to the largest; equal ones are all at the bottom.
    known = [mean for mean in means if math.isfinite(mean)]

    low, high = min(known, default=0.0), max(known, default=0.0)
    span = (high - low) or 1.0
    top = len(BARS) - 1

    bars = []
    for mean in means:
        bars.append(BARS[round((mean - low) / span * top)] if math.isfinite(mean) else " ")

    return "".join(bars)


def curve_svg(curves: dict[str, list[Point]]) -> str:
    """Return the curves over their steps, on one scale, each with its name and its last value."""
    # Only so many points as the picture can show.
    finite = {
        name: [(x, y) for x, y in thinned(points, MAX_POINTS) if math.isfinite(y)] for name, points in curves.items()
    }

    points = [point for curve in finite.values() for point in curve]
    if not points:
        return ""

    # Steps go from left to right, and losses from bottom to top; the names are above.
    xs, ys = [x for x, _ in points], [y for _, y in points]

    left, low = min(xs), min(ys)
    across = (WIDTH - 8) / ((max(xs) - left) or 1.0)
    up = (HEIGHT - 28) / ((max(ys) - low) or 1.0)

    parts = []
    for index, (name, curve) in enumerate(item for item in finite.items() if item[1]):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{4 + (x - left) * across:.1f},{HEIGHT - 6 - (y - low) * up:.1f}" for x, y in curve)

        # A lone point is a line of no length, which round ends show as a dot.
        path = f"{path} {path}" if len(curve) == 1 else path
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-linecap="round"/>'
        )

        # The names stand side by side, above the curves.
        label = f"{escaped(name)} {figures(curve[-1][1], 4)}"
        parts.append(
            f'<text x="{4 + WIDTH * index // len(finite)}" y="13" font-size="12" fill="{colour}">{label}</text>'
        )

    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{escaped(", ".join(finite))}">{"".join(parts)}</svg>'
    )
