"""The data of the lab, generated: pictures of shapes, and text whose lowest possible loss is known.

Nothing is downloaded. Sample i depends on the seed and i alone, so any rank can make any sample, and two runs see the
same data.
"""

from __future__ import annotations

import colorsys
import math

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.errors import UserError

SHAPES = ("circle", "square", "triangle", "cross")
CLASSES = tuple(f"{style} {shape}" for shape in SHAPES for style in ("filled", "outlined"))

# The 100 classes for large models: a regular polygon of 3 to 7 sides, filled or outlined, in one of ten hues.
SIDES = (3, 4, 5, 6, 7)
HUES = 10


class ShapeClass(Dataset[tuple[Tensor, int]]):
    """Pictures of one shape each; the class is the shape and whether it is filled, and with 100 classes its hue.

    Sample `index` depends on `seed` and `index` alone, so every rank can draw any sample. Use another seed
    for the test set.
    """

    def __init__(self, samples: int = 10_000, *, seed: int = 0, pixels: int = 32, classes: int = len(CLASSES)):
        if classes not in (len(CLASSES), 2 * len(SIDES) * HUES):
            raise UserError(f"there are no {classes} classes of shapes", "", "use classes=8 or classes=100")

        self.samples = samples
        self.seed = seed
        self.pixels = pixels
        self.classes = classes

        # Drawn pictures: an epoch reads each of them again.
        self._drawn: dict[int, tuple[Tensor, int]] = {}

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return a picture, float32 [3, pixels, pixels], and its class."""
        if not 0 <= index < self.samples:
            raise IndexError(index)

        if index not in self._drawn:
            random = np.random.default_rng((self.seed, index))
            label = int(random.integers(self.classes))
            self._drawn[index] = (_draw(random, self.pixels, *self._kind(label)), label)

        return self._drawn[index]

    def batch(self, indices: range | list[int]) -> tuple[Tensor, Tensor]:
        """Return the pictures and classes of these samples, stacked."""
        pictures, classes = zip(*(self[index] for index in indices), strict=True)
        return torch.stack(pictures), torch.tensor(classes)

    def _kind(self, label: int) -> tuple[str | int, bool, int | None]:
        """Return the shape of a class, whether it is outlined, and its hue if the class has one."""
        if self.classes == len(CLASSES):
            return SHAPES[label // 2], bool(label % 2), None

        # A hundred classes: the label counts hues first, then styles, then sides.
        label, hue = divmod(label, HUES)
        return SIDES[label // 2], bool(label % 2), hue


def _draw(random: np.random.Generator, pixels: int, shape: str | int, outlined: bool, hue: int | None) -> Tensor:
    """Return a picture of one shape: its size, place, angle and colours are random, and every pixel has some noise."""
    # The picture's coordinates, in the shape's own frame: moved, turned and scaled.
    radius = random.uniform(0.45, 0.8)
    centre = random.uniform(-0.9 + radius, 0.9 - radius, 2)
    angle = random.uniform(0, 2 * math.pi)

    # The centre of each pixel, from -1 to 1.
    line = (np.arange(pixels) + 0.5) / pixels * 2 - 1
    y, x = np.meshgrid(line - centre[1], line - centre[0], indexing="ij")

    # Turned back by the angle, and divided by the radius: the shape has radius 1 and stands upright in (u, v).
    u = (x * math.cos(angle) + y * math.sin(angle)) / radius
    v = (y * math.cos(angle) - x * math.sin(angle)) / radius

    distance = _distance(shape, u, v)

    # An outline is a band just inside the edge.
    inside = np.abs(distance + 0.12) < 0.12 if outlined else distance < 0

    # The background is dark and the shape bright, so that no picture hides its shape.
    back, front = random.uniform(0, 0.4, 3), random.uniform(0.6, 1, 3)
    if hue is not None:
        front = np.array(colorsys.hsv_to_rgb((hue + random.uniform(-0.3, 0.3)) / HUES % 1, 0.8, front[0]))

    picture = np.where(inside, front[:, None, None], back[:, None, None])
    picture = picture + random.normal(0, 0.05, picture.shape)
    return torch.from_numpy((picture - 0.5).astype(np.float32))


def _distance(shape: str | int, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return how far each pixel is outside the shape, or the regular polygon of so many sides; negative inside."""
    if isinstance(shape, int):
        # A regular polygon is the intersection of half planes, one for each side.
        angles = 2 * math.pi * np.arange(shape)[:, None, None] / shape
        return (u * np.cos(angles) + v * np.sin(angles)).max(0) - math.cos(math.pi / shape)

    match shape:
        case "circle":
            return np.hypot(u, v) - 1
        case "square":
            return np.maximum(np.abs(u), np.abs(v)) - 0.8
        case "triangle":
            return np.maximum(-v, (np.abs(u) * math.sqrt(3) + v) / 2) - 0.5

        # A cross: near to one axis, and not beyond its ends.
        case _:
            arms = np.minimum(np.abs(u), np.abs(v)) - 0.33
            return np.maximum(arms, np.maximum(np.abs(u), np.abs(v)) - 1)


class MarkovText(Dataset[Tensor]):
    """Text in which the two last symbols decide how likely the next one is, so that its entropy rate is known.

    No model can reach a lower loss than `entropy`, and a good one comes close to it.
    """

    SYMBOLS = 64
    CHOICES = 4  # symbols that can follow a pair

    def __init__(self, samples: int = 4096, *, length: int = 64, seed: int = 0):
        self.samples, self.length, self.seed = samples, length, seed

        # Which symbols can follow each pair, and how likely each is: [symbols, symbols, choices] both.
        language = np.random.default_rng(7)  # one language for all seeds
        self._next = language.integers(self.SYMBOLS, size=(self.SYMBOLS, self.SYMBOLS, self.CHOICES))
        self._likely = language.dirichlet(np.ones(self.CHOICES), size=(self.SYMBOLS, self.SYMBOLS))

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        """Return `length` + 1 symbols, int64: the inputs, and one more for the targets."""
        if not 0 <= index < self.samples:
            raise IndexError(index)

        random = np.random.default_rng((self.seed, index))
        symbols = list(random.integers(self.SYMBOLS, size=2))
        while len(symbols) < self.length + 1:
            pair = symbols[-2], symbols[-1]
            choice = random.choice(self.CHOICES, p=self._likely[pair])
            symbols.append(self._next[pair][choice])

        return torch.tensor(np.array(symbols))

    def entropy(self) -> float:
        """Return the average entropy of the next symbol in nats, over pairs as they occur in the text."""
        # The entropy after each pair.
        surprise = np.zeros((self.SYMBOLS, self.SYMBOLS))
        for choice in range(self.CHOICES):
            # Two choices may be the same symbol: their probabilities add up.
            same = self._next == self._next[..., choice : choice + 1]
            surprise -= self._likely[..., choice] * np.log((self._likely * same).sum(-1))

        # The stationary distribution of pairs, by repeated steps of the chain.
        pairs = np.full((self.SYMBOLS, self.SYMBOLS), self.SYMBOLS**-2.0)
        second = np.arange(self.SYMBOLS)[None, :, None]

        # A pair (a, b) is followed by (b, c) for each choice c.
        for _ in range(200):
            after = np.zeros_like(pairs)
            np.add.at(after, (np.broadcast_to(second, self._next.shape), self._next), pairs[..., None] * self._likely)
            pairs = after

        return float((pairs * surprise).sum())
