"""Shapes as analytic masks on a noisy grey background, in bytes: a generated picture is what a PNG holds.

Shapes in comments: pictures are (3, size, size), masks and planes cover some rows and columns of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

COLOURS = {
    "red": (1.0, 0.1, 0.1),
    "green": (0.1, 0.9, 0.2),
    "blue": (0.15, 0.3, 1.0),
    "yellow": (1.0, 0.95, 0.1),
    "purple": (0.7, 0.15, 0.85),
    "white": (1.0, 1.0, 1.0),
    "orange": (1.0, 0.55, 0.05),
    "cyan": (0.1, 0.95, 0.95),
}

# The same as arrays (3, 1, 1).
RGB = {name: np.asarray(rgb, np.float32)[:, None, None] for name, rgb in COLOURS.items()}

Mask = NDArray[np.bool_]
Plane = NDArray[np.float32]


@dataclass(frozen=True)
class Thing:
    """One object of a picture; x, y and radius are in pixels."""

    colour: str
    shape: str
    texture: str
    x: float
    y: float
    radius: float
    brightness: float


def draw(things: Sequence[Thing], size: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return the picture (3, size, size). Only the level and the noise of the background come from `rng`."""
    image = np.full((3, size, size), rng.uniform(0.05, 0.35), np.float32)
    for thing in things:
        _put(thing, image)

    # In place throughout: a worker of the data loader spends most of its time here.
    noise = rng.standard_normal(image.shape, np.float32)
    noise *= np.float32(0.06)
    image += noise
    np.clip(image, 0.0, 1.0, out=image)
    image *= np.float32(255.0)
    image += np.float32(0.5)
    return image.astype(np.uint8)


def _put(thing: Thing, image: Plane) -> None:
    """Draw a thing into `image` (3, size, size), looking only at the pixels around it."""
    size = image.shape[-1]
    reach = 1.03 * thing.radius + 1  # the farthest point of any shape is a foot of the triangle
    columns = _span(thing.x, reach, size)
    rows = _span(thing.y, reach, size)

    # Relative to the centre of the thing, in float32 like the mask's formulas.
    across, down = _grid(size)
    mask = _textured(thing, across[:, columns] - np.float32(thing.x), down[rows] - np.float32(thing.y))
    np.copyto(image[:, rows, columns], RGB[thing.colour] * np.float32(thing.brightness), where=mask)


def _span(middle: float, reach: float, size: int) -> slice:
    return slice(max(0, int(middle - reach)), min(size, int(middle + reach) + 1))


@cache
def _grid(size: int) -> tuple[Plane, Plane]:
    """Return the x (1, size) and y (size, 1) of the centres of the pixels."""
    middle = np.arange(size, dtype=np.float32) + np.float32(0.5)
    return middle[None, :], middle[:, None]


def _textured(thing: Thing, x: Plane, y: Plane) -> Mask:
    """Return which of the points (x, y), relative to its centre, a thing covers."""
    mask = _inside(thing.shape, x, y, thing.radius)
    if thing.texture == "striped":
        # Stripes of less than a pixel would be grey.
        period = max(2.0, thing.radius * 0.55)
        return mask & (np.floor((x + y) / np.float32(period)) % 2 == 0)

    if thing.texture != "outlined":
        return mask

    # An outlined shape is the shape without a smaller copy of itself. A ring has two edges, and without a smaller ring
    # it would look exactly like an outlined circle.
    if thing.shape == "ring":
        r = thing.radius
        square = x * x + y * y
        return mask & ~((square > 0.3 * r * r) & (square < 0.64 * r * r))

    return mask & ~_inside(thing.shape, x, y, thing.radius * 0.6)


def _inside(shape: str, x: Plane, y: Plane, r: float) -> Mask:
    """Return the points of a shape of radius `r` around the origin; y points down."""
    if shape == "circle":
        return x * x + y * y <= r * r

    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) <= 0.85 * r

    if shape == "triangle":
        # Its tip is up.
        return (y <= 0.8 * r) & (np.abs(x) * 1.75 <= y + r)

    if shape == "cross":
        return (np.minimum(np.abs(x), np.abs(y)) <= 0.3 * r) & (np.maximum(np.abs(x), np.abs(y)) <= r)

    if shape == "ring":
        square = x * x + y * y
        return (square <= r * r) & (square >= 0.16 * r * r)

    # A star, whose radius follows the angle from straight up.
    assert shape == "star", shape
    return np.sqrt(x * x + y * y) <= r * (0.65 + 0.35 * np.cos(5 * np.arctan2(x, -y)))
