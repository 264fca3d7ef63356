"""ShapeScenes: pictures of simple things, with the one caption that describes each.

Sample `index` of a split is a pure function of (seed, split, index): any rank makes any sample, and nothing is stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.recipes.pixel_llm.drawing import COLOURS, Thing, draw
from lockstep.recipes.pixel_llm.words import Words

# Centres of the places that captions name, as shares of the picture.
PLACES = {
    "upper-left": (0.27, 0.27),
    "upper-right": (0.73, 0.27),
    "lower-left": (0.27, 0.73),
    "lower-right": (0.73, 0.73),
    "centre": (0.5, 0.5),
}
RELATIONS = ("above", "below", "left-of", "right-of")

# The kinds of words that a picture decides; 0 stands for all other words.
SLOTS = ("size", "texture", "colour", "shape", "place", "relation")
SLOT_NUMBERS = {None: 0, **{slot: 1 + number for number, slot in enumerate(SLOTS)}}

# The share of all combinations that training never shows, and the names of the splits.
HELD_OUT_SHARE = 0.1
TRAIN, IID, COMP = "train", "iid", "comp"

# Radii and distances are given in pixels of a picture of this size and grow with it.
REFERENCE_SIZE = 32

Spot = tuple[float, float]


@dataclass(frozen=True)
class SceneKind:
    """What scenes of a kind are made of, and so which words their captions need."""

    colours: tuple[str, ...]
    shapes: tuple[str, ...]

    # The smallest and the largest radius by size word.
    radii: dict[str, tuple[float, float]]
    says_size: bool = True
    textures: tuple[str, ...] = ()

    # How many things a scene has.
    fewest: int = 1
    most: int = 1

    @property
    def slots(self) -> tuple[str, ...]:
        """The members of SLOTS that its captions have."""
        # In the order of SLOTS. Only a single thing has a place, and only several have relations.
        present = (self.says_size, self.textures, True, True, self.fewest == 1, self.most > 1)
        return tuple(slot for slot, used in zip(SLOTS, present, strict=True) if used)

    @property
    def words(self) -> Words:
        places = ("in", "the", *PLACES) if self.fewest == 1 else ()
        sizes = self.radii if self.says_size else ()
        relations = RELATIONS if self.most > 1 else ()
        words = ("a", *places, *sizes, *self.textures, *self.colours, *self.shapes, *relations)

        # A thing takes: a, size, texture, colour, shape. Between two things is a relation, and one thing has a place.
        per_thing = 3 + self.says_size + bool(self.textures)
        several = self.most * per_thing + self.most - 1
        single = per_thing + 3 if self.fewest == 1 else 0
        return Words(words, max(several, single))


COLOUR_NAMES = tuple(COLOURS)
SHAPES = ("circle", "square", "triangle", "cross", "star", "ring")
KINDS = {
    "few": SceneKind(COLOUR_NAMES[:4], SHAPES[:2], {"small": (3.5, 4.5), "large": (6.0, 7.5)}),
    "one": SceneKind(COLOUR_NAMES[:6], SHAPES[:4], {"small": (3.5, 4.5), "large": (6.0, 7.5)}),
    "pair": SceneKind(COLOUR_NAMES[:6], SHAPES[:4], {"any": (3.0, 5.0)}, says_size=False, fewest=2, most=2),
    "many": SceneKind(
        COLOUR_NAMES,
        SHAPES,
        {"small": (2.4, 3.0), "large": (4.2, 5.2)},
        textures=("solid", "striped", "outlined"),
        most=4,
    ),
}


class CaptionPart(NamedTuple):
    word: str
    slot: str | None = None  # the slot it fills, if the picture decides it


@dataclass(frozen=True)
class Scene:
    things: tuple[Thing, ...]
    parts: tuple[CaptionPart, ...]

    @property
    def caption(self) -> list[str]:
        return [part.word for part in self.parts]


class Sample(NamedTuple):
    """One sample, or a batch of them with one more dimension in front."""

    # (3, size, size) uint8
    image: Tensor

    # (length + 1,) int32: embeddings take it, and it is half of int64.
    ids: Tensor

    # (length,) int64: SLOT_NUMBERS of the words to write.
    slots: Tensor

    # () bool: whether training never shows this combination.
    held_out: Tensor

    # () int64: the number of things.
    things: Tensor


class ShapeScenes(Dataset[Sample]):
    """Scenes of one kind, made when they are read."""

    def __init__(
        self, kind: SceneKind, size: int, split: str, length: int, seed: int = 0, unrelated_captions: bool = False
    ):
        """With `unrelated_captions` every picture gets the caption of another one, as a control."""
        self.kind = kind
        self.size = size
        self.split = split
        self.length = length
        self.seed = seed
        self.unrelated_captions = unrelated_captions

        # Made once: every sample needs them.
        self.words = kind.words

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        return Sample(*(rows[0] for rows in self.__getitems__([index])))

    def __getitems__(self, indices: Sequence[int]) -> Sample:
        """Return a collated batch of the samples that `__getitem__` returns one by one."""
        for index in indices:
            if not 0 <= index < self.length:
                raise IndexError(index)

        # Arrays for the whole batch: nothing is left to collate.
        count, length = len(indices), self.words.length
        images = np.empty((count, 3, self.size, self.size), np.uint8)
        ids = np.empty((count, length + 1), np.int32)
        slots = np.zeros((count, length), np.int64)
        things = np.empty(count, np.int64)

        # Two streams for the control: the pictures stay those of a normal run, and only the captions differ.
        shown = Stream(self.seed, self.split)
        unrelated = Stream(self.seed, f"{self.split}, told") if self.unrelated_captions else None
        for row, index in enumerate(indices):
            scene = self._draw(index, shown)
            images[row] = draw(scene.things, self.size, shown.rng)
            things[row] = len(scene.things)

            described = self._draw(index, unrelated) if unrelated else scene
            ids[row] = self.words.ids(described.caption)
            slots[row, : len(described.parts)] = [SLOT_NUMBERS[part.slot] for part in described.parts]

        arrays = images, ids, slots, np.full(count, self.split == COMP), things
        return Sample(*map(torch.from_numpy, arrays))

    def scene(self, index: int) -> Scene:
        return self._draw(index, Stream(self.seed, self.split))

    def _draw(self, index: int, stream: Stream) -> Scene:
        """Draw scenes from the sample's own random stream until one has a combination of this split."""
        # Most need one attempt; a scene of COMP, a tenth of all combinations, needs ten on average.
        for attempt in range(10_000):
            scene = draw_scene(self.kind, self.size, stream.at(index, attempt))
            if is_held_out(scene) == (self.split == COMP):
                return scene

        raise AssertionError("no combination of this kind belongs to the split")


class Stream:
    """Random numbers keyed by seed, name, sample and attempt."""

    def __init__(self, seed: int, name: str):
        # Philox is a counter and a hash of it, so that any sample is reached without drawing those before it.
        self._philox = np.random.Philox(key=np.array([seed, hashed(name)], dtype=np.uint64), counter=0)
        self._start = self._philox.state
        self.rng = np.random.Generator(self._philox)

    def at(self, index: int, attempt: int) -> np.random.Generator:
        """Move the generator to the beginning of a sample's attempt: making a new one takes far longer."""
        # The counter has four words. The first two count the draws within an attempt, and begin at 0.
        self._start["state"]["counter"][2:] = attempt, index
        self._philox.state = self._start
        return self.rng


def is_held_out(scene: Scene) -> bool:
    """Return whether training never shows this combination: a keyed hash of the words that the picture decides."""
    decided = " ".join(part.word for part in scene.parts if part.slot)
    return hashed(decided, key=b"compositions") < HELD_OUT_SHARE * 2**64


def hashed(text: str, key: bytes = b"") -> int:
    """Return 64 bits that depend on `text` and `key` alone."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8, key=key).digest(), "little")


def draw_scene(kind: SceneKind, size: int, rng: np.random.Generator) -> Scene:
    """Draw a scene. Its colours differ, and captions name them in a fixed order: a picture has one right caption."""
    # The order of these draws decides every picture. It must never change: the golden losses, and every picture that a
    # checkpoint was trained on, would be others.
    count = int(rng.integers(kind.fewest, kind.most + 1))
    colours = sorted(rng.permutation(len(kind.colours))[:count].tolist())
    shapes = choices(kind.shapes, count, rng)
    size_names = choices(tuple(kind.radii), count, rng)
    textures = choices(kind.textures, count, rng) if kind.textures else ["solid"] * count

    # A single thing is near a named place; several are anywhere, apart from each other.
    radii = [size / REFERENCE_SIZE * between(*kind.radii[name], rng.random()) for name in size_names]
    place = tuple(PLACES)[int(rng.integers(len(PLACES)))] if count == 1 else None
    spots = [_near(place, size, rng)] if place else _apart(radii, size, rng)
    brightness = [between(0.75, 1.0, share) for share in rng.random(count).tolist()]

    things: list[Thing] = []
    parts: list[CaptionPart] = []
    for i, (x, y) in enumerate(spots):
        thing = Thing(kind.colours[colours[i]], shapes[i], textures[i], x, y, radii[i], brightness[i])
        things.append(thing)

        # The caption: the relation to the thing before, then the thing itself.
        if i:
            parts.append(CaptionPart(relation(spots[i - 1], (x, y)), "relation"))

        parts.append(CaptionPart("a"))
        if kind.says_size:
            parts.append(CaptionPart(size_names[i], "size"))
        if kind.textures:
            parts.append(CaptionPart(thing.texture, "texture"))

        parts += [CaptionPart(thing.colour, "colour"), CaptionPart(thing.shape, "shape")]

    if place:
        parts += [CaptionPart("in"), CaptionPart("the"), CaptionPart(place, "place")]

    return Scene(tuple(things), tuple(parts))


def choices(names: tuple[str, ...], count: int, rng: np.random.Generator) -> list[str]:
    """Choose `count` names one by one: for a handful, an array of random numbers takes longer."""
    return [names[rng.integers(len(names))] for _ in range(count)]


def between(low: float, high: float, share: float) -> float:
    """Return what `Generator.uniform` computes; numpy takes longer to check its arguments."""
    return low + (high - low) * share


def relation(spot: Spot, origin: Spot) -> str:
    """Return where `spot` lies as seen from `origin`, along the longer distance."""
    right = spot[0] - origin[0]
    down = spot[1] - origin[1]
    if abs(right) > abs(down):
        return "right-of" if right > 0 else "left-of"
    return "below" if down > 0 else "above"


def _near(place: str, size: int, rng: np.random.Generator) -> Spot:
    """Draw a spot within 1.5 reference pixels of a named place."""
    x, y = PLACES[place]
    right, down = (between(-1.5, 1.5, share) * size / REFERENCE_SIZE for share in rng.random(2).tolist())
    return x * size + right, y * size + down


def _apart(radii: list[float], size: int, rng: np.random.Generator) -> list[Spot]:
    """Draw spots so that nothing overlaps or leaves the picture, and neighbours in the caption relate clearly."""
    while True:
        spots: list[Spot] = []
        for radius in radii:
            # Twenty at once, because a call of the generator costs more than the numbers.
            candidates = (
                (between(radius, size - radius, x), between(radius, size - radius, y))
                for x, y in rng.random((20, 2)).tolist()
            )
            spot = next((spot for spot in candidates if _fits(spot, radius, spots, radii, size)), None)

            # If there is no room left, begin again with the first thing.
            if spot is None:
                break

            spots.append(spot)
        else:
            return spots


def _fits(spot: Spot, radius: float, spots: list[Spot], radii: list[float], size: int) -> bool:
    """Return whether a thing fits there, beside those at `spots`, which have the first of the `radii`."""
    if not spots:
        return True

    gap = size / REFERENCE_SIZE  # one reference pixel, so that two things never touch
    placed = zip(spots, radii, strict=False)
    if any(math.dist(spot, other) < radius + other_radius + gap for other, other_radius in placed):
        return False

    # For things that lie diagonally, neither "above" nor "left-of" would be clear.
    right = abs(spots[-1][0] - spot[0])
    down = abs(spots[-1][1] - spot[1])
    return abs(right - down) > 2 * gap
