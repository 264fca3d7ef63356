"""ShapeScenes: pictures of simple things, with the one caption that describes each.

Sample `index` of a split is a pure function of (seed, split, index): any rank makes any sample, nothing is stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.recipes.pixel_llm.drawing import COLOURS, Thing, draw
from lockstep.recipes.pixel_llm.words import Words

PLACES = {  # in shares of the image
    "upper-left": (0.27, 0.27),
    "upper-right": (0.73, 0.27),
    "lower-left": (0.27, 0.73),
    "lower-right": (0.73, 0.73),
    "centre": (0.5, 0.5),
}
RELATIONS = ("above", "below", "left-of", "right-of")
SLOTS = ("size", "texture", "colour", "shape", "place", "relation")  # the words that a picture decides
SLOT_NUMBERS = {None: 0, **{slot: 1 + number for number, slot in enumerate(SLOTS)}}
HELD_OUT_SHARE = 0.1  # of all combinations
TRAIN, IID, COMP = "train", "iid", "comp"


@dataclass(frozen=True)
class Kind:
    """What scenes are made of. Radii are in pixels of a 32-pixel image, and grow with it."""

    colours: tuple[str, ...]
    shapes: tuple[str, ...]
    radii: dict[str, tuple[float, float]]  # by size word
    says_size: bool = True
    textures: tuple[str, ...] = ()
    fewest: int = 1
    most: int = 1

    @property
    def slots(self) -> tuple[str, ...]:
        """Those of SLOTS that its captions have."""
        has = (self.says_size, bool(self.textures), True, True, self.fewest == 1, self.most > 1)
        return tuple(slot for slot, here in zip(SLOTS, has, strict=True) if here)

    @property
    def words(self) -> Words:
        relations = RELATIONS if self.most > 1 else ()
        places = ("in", "the", *PLACES) if self.fewest == 1 else ()
        sizes = tuple(self.radii) if self.says_size else ()
        each = 3 + self.says_size + bool(self.textures)  # a, size, texture, colour, shape
        longest = max(self.most * each + self.most - 1, each + 3 if self.fewest == 1 else 0)
        return Words(("a", *places, *sizes, *self.textures, *self.colours, *self.shapes, *relations), longest)


COLOUR_NAMES, SHAPES = tuple(COLOURS), ("circle", "square", "triangle", "cross", "star", "ring")
KINDS = {
    "few": Kind(COLOUR_NAMES[:4], SHAPES[:2], {"small": (3.5, 4.5), "large": (6.0, 7.5)}),
    "one": Kind(COLOUR_NAMES[:6], SHAPES[:4], {"small": (3.5, 4.5), "large": (6.0, 7.5)}),
    "pair": Kind(COLOUR_NAMES[:6], SHAPES[:4], {"any": (3.0, 5.0)}, says_size=False, fewest=2, most=2),
    "many": Kind(
        COLOUR_NAMES, SHAPES, {"small": (2.4, 3.0), "large": (4.2, 5.2)},
        textures=("solid", "striped", "outlined"), most=4,
    ),
}  # fmt: skip


class Part(NamedTuple):
    """One word of a caption, and the slot it fills, if the picture decides it."""

    word: str
    slot: str | None = None


@dataclass(frozen=True)
class Scene:
    things: tuple[Thing, ...]
    parts: tuple[Part, ...]

    @property
    def caption(self) -> list[str]:
        return [part.word for part in self.parts]


class Sample(NamedTuple):
    image: Tensor  # (3, size, size) uint8
    ids: Tensor  # (length + 1,) int32
    slots: Tensor  # (length,) int64: of the words to write, 1 + the number in SLOTS, 0 elsewhere
    held_out: Tensor  # (): a combination that training never shows
    things: Tensor  # (): how many


class ShapeScenes(Dataset[Sample]):
    def __init__(self, kind: Kind, size: int, split: str, length: int, seed: int = 0, unrelated_captions: bool = False):
        """`unrelated_captions` is the control: every picture gets the caption of another one."""
        self.kind, self.size, self.split, self.length, self.seed = kind, size, split, length, seed
        self.unrelated_captions = unrelated_captions
        self.words = kind.words

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        return Sample(*(rows[0] for rows in self.__getitems__([index])))

    def __getitems__(self, indices: Sequence[int]) -> Sample:
        """A whole batch, collated: every sample is the one that `__getitem__` gives."""
        if outside := [index for index in indices if not 0 <= index < self.length]:
            raise IndexError(outside[0])
        count, length = len(indices), self.words.length
        images = np.empty((count, 3, self.size, self.size), np.uint8)
        ids, slots = np.empty((count, length + 1), np.int32), np.zeros((count, length), np.int64)
        things = np.empty(count, np.int64)
        shown = Stream(self.seed, self.split)
        told = Stream(self.seed, f"{self.split}, told") if self.unrelated_captions else None
        for row, index in enumerate(indices):
            scene = self._draw(index, shown)
            images[row] = draw(scene.things, self.size, shown.rng)
            things[row] = len(scene.things)
            parts = (self._draw(index, told) if told else scene).parts
            ids[row] = self.words.numbers([part.word for part in parts])
            slots[row, : len(parts)] = [SLOT_NUMBERS[part.slot] for part in parts]
        held_out = np.full(count, self.split == COMP)
        return Sample(*map(torch.from_numpy, (images, ids, slots, held_out, things)))

    def scene(self, index: int) -> Scene:
        return self._draw(index, Stream(self.seed, self.split))

    def _draw(self, index: int, stream: Stream) -> Scene:
        """The first scene of the sample's own random stream whose combination belongs to the split."""
        for attempt in range(10_000):
            scene = draw_scene(self.kind, self.size, stream.at(index, attempt))
            if is_held_out(scene) == (self.split == COMP):
                return scene
        raise AssertionError("no combination of this kind belongs to the split")


class Stream:
    """Random numbers keyed by seed, name, sample and attempt. One generator is moved: making one takes far longer."""

    def __init__(self, seed: int, name: str):
        number = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        philox = np.random.Philox(key=np.array([seed, number], dtype=np.uint64), counter=0)
        self.rng, self._philox, self._start = np.random.Generator(philox), philox, philox.state

    def at(self, index: int, attempt: int) -> np.random.Generator:
        self._start["state"]["counter"][2:] = attempt, index
        self._philox.state = self._start
        return self.rng


def is_held_out(scene: Scene) -> bool:
    """By a keyed hash of the words that the picture decides, so that it depends on nothing else."""
    said = " ".join(part.word for part in scene.parts if part.slot)
    digest = blake2b(said.encode(), digest_size=8, key=b"compositions").digest()
    return int.from_bytes(digest, "little") < HELD_OUT_SHARE * 2**64


def draw_scene(kind: Kind, size: int, rng: np.random.Generator) -> Scene:
    """Things are named in the order of the list of colours, which differ: one picture has one right caption."""
    count = int(rng.integers(kind.fewest, kind.most + 1))
    colours = sorted(rng.permutation(len(kind.colours))[:count].tolist())
    shapes = choices(kind.shapes, count, rng)
    size_names = choices(tuple(kind.radii), count, rng)
    textures = choices(kind.textures, count, rng) if kind.textures else []
    scale = size / 32
    radii = [scale * between(*kind.radii[name], rng.random()) for name in size_names]
    place = tuple(PLACES)[int(rng.integers(len(PLACES)))] if count == 1 else None
    spots = [_near(place, size, rng)] if place else _apart(radii, size, rng)
    brightness = [between(0.75, 1.0, share) for share in rng.random(count).tolist()]
    things, parts = [], []
    for i, (x, y) in enumerate(spots):
        colour, shape = kind.colours[colours[i]], shapes[i]
        texture = textures[i] if textures else "solid"
        things.append(Thing(colour, shape, texture, x, y, radii[i], brightness[i]))
        if i:
            parts.append(Part(relation(spots[i - 1], (x, y)), "relation"))
        sized = [Part(size_names[i], "size")] if kind.says_size else []
        textured = [Part(texture, "texture")] if textures else []
        parts += [Part("a"), *sized, *textured, Part(colour, "colour"), Part(shape, "shape")]
    if place:
        parts += [Part("in"), Part("the"), Part(place, "place")]
    return Scene(tuple(things), tuple(parts))


def choices(names: tuple[str, ...], count: int, rng: np.random.Generator) -> list[str]:
    """One after another: for so few, an array of random numbers takes longer."""
    return [names[rng.integers(len(names))] for _ in range(count)]


def between(low: float, high: float, share: float) -> float:
    """What `Generator.uniform` computes; numpy takes longer to look at its arguments."""
    return low + (high - low) * share


Spot = tuple[float, float]


def relation(one: Spot, other: Spot) -> str:
    """Where the first lies, seen from the second, along the longer way."""
    right, down = one[0] - other[0], one[1] - other[1]
    if abs(right) > abs(down):
        return "right-of" if right > 0 else "left-of"
    return "below" if down > 0 else "above"


def _near(place: str, size: int, rng: np.random.Generator) -> Spot:
    x, y = PLACES[place]
    right, down = (between(-1.5, 1.5, share) * size / 32 for share in rng.random(2).tolist())
    return x * size + right, y * size + down


def _apart(radii: list[float], size: int, rng: np.random.Generator) -> list[Spot]:
    """Spots where nothing overlaps or leaves the image, and every relation of neighbours in the caption is plain."""
    while True:
        spots: list[Spot] = []
        for radius in radii:
            spot = next((s for s in _candidates(radius, size, rng) if _fits(s, radius, spots, radii, size)), None)
            if spot is None:
                break
            spots.append(spot)
        else:
            return spots


def _candidates(radius: float, size: int, rng: np.random.Generator, tries: int = 20) -> Iterator[Spot]:
    for x, y in rng.random((tries, 2)).tolist():
        yield between(radius, size - radius, x), between(radius, size - radius, y)


def _fits(spot: Spot, radius: float, spots: list[Spot], radii: list[float], size: int) -> bool:
    gap = size / 32
    if any(math.dist(spot, other) < radius + r + gap for other, r in zip(spots, radii, strict=False)):
        return False
    if not spots:
        return True
    right, down = abs(spots[-1][0] - spot[0]), abs(spots[-1][1] - spot[1])
    return abs(right - down) > 2 * gap
