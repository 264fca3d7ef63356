"""A small world of facts. Sample i of a split is a function of (seed, split, i) alone: any rank makes any sample, and
nothing is stored. Samples are drawn many at a time, as the numbers of their words.

Shapes in comments: N samples, C words of context, Q questions each.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np

from lockstep.recipes.latent_wire.draws import pick, uniform

NAMES = ("anna", "boris", "clara", "dmitri", "elena", "felix", "greta", "hugo")
COLOURS = ("red", "green", "blue", "yellow", "purple", "white")
OBJECTS = ("ball", "chair", "drum", "flute", "glove", "hammer", "lamp", "mirror")
PLACES = ("attic", "barn", "cellar", "garden", "kitchen", "office")
ASKED = ("colour", "item", "place", "who")
MARKS = (".", "?")

KINDS = len(ASKED)
LOOKS = len(COLOURS) * len(PLACES)  # ways in which a person can have a thing
TEST, VALIDATION = 4, 2  # so many of them are for the test, and to decide when a reader has learned enough
SPLITS = {  # the ways of each split
    "test": slice(TEST),
    "validation": slice(TEST, TEST + VALIDATION),
    "train": slice(TEST + VALIDATION, None),
}


@dataclass(frozen=True)
class Drawn:
    """Samples as numbers of words."""

    context: np.ndarray  # (N, C)
    question: np.ndarray  # (N, Q, words)
    answer: np.ndarray  # (N, Q)


class World(Protocol):
    """What contexts say and what is asked about them."""

    @property
    def questions(self) -> int: ...

    @property
    def seed(self) -> int: ...

    @property
    def words(self) -> tuple[str, ...]: ...

    def draw(self, split: str, ids: np.ndarray) -> Drawn: ...

    def easier(self) -> Sequence[World]:
        """Worlds to learn first."""
        ...


@dataclass(frozen=True)
class FactWorld:
    """Contexts of `facts` facts about different people and things, and `questions` different questions about each."""

    facts: int = 1
    questions: int = 2
    seed: int = 0

    @property
    def words(self) -> tuple[str, ...]:
        return NAMES + COLOURS + OBJECTS + PLACES + ASKED + MARKS

    def draw(self, split: str, ids: np.ndarray) -> Drawn:
        facts, people, things = self.facts, len(NAMES), len(OBJECTS)
        numbers = uniform(self.seed, split, ids, people + things + facts + facts * KINDS)
        by_name, by_item, by_look, by_question = np.split(numbers, np.cumsum([people, things, facts]), axis=1)
        name, item = pick(by_name, facts), pick(by_item, facts)  # (N, F)
        looks = looks_of(split)[name, item]  # (N, F, ways)
        look = np.take_along_axis(looks, (by_look * looks.shape[-1]).astype(np.int64)[..., None], -1)[..., 0]
        colour, place = look // len(PLACES), look % len(PLACES)
        said = np.stack([_number(NAMES) + name, _number(COLOURS) + colour, _number(OBJECTS) + item,
                         _number(PLACES) + place, np.full_like(name, _number(MARKS))], -1)  # fmt: skip
        asked = pick(by_question, self.questions)  # (N, Q)
        fact = np.take_along_axis(said, (asked // KINDS)[..., None], 1)  # (N, Q, 5)
        kind = asked % KINDS
        who = kind == ASKED.index("who")
        about, answer = np.where(who, fact[..., 2], fact[..., 0]), np.where(who, fact[..., 0], _pick(fact, kind + 1))
        question = np.stack([_number(ASKED) + kind, about, np.full_like(kind, _number(MARKS) + 1)], -1)
        return Drawn(said.reshape(len(ids), -1), question, answer)

    def easier(self) -> Sequence[World]:
        """One fact, then two, then four."""
        fewer = [count for count in (1, 2, 4) if count < self.facts]
        return [FactWorld(count, min(self.questions, KINDS * count), self.seed) for count in fewer]


@cache
def looks_of(split: str) -> np.ndarray:
    """Colours and places (people, things, ways) in which a person has a thing. Which of the 36 belong to a split is
    told by the words; no two splits share one."""
    every = [
        sorted(range(LOOKS), key=lambda look: zlib.crc32(" ".join(fact_words(name, item, look)).encode()))
        for name in range(len(NAMES))
        for item in range(len(OBJECTS))
    ]
    table = np.array(every).reshape(len(NAMES), len(OBJECTS), LOOKS)
    return table[..., SPLITS[split]]


def fact_words(name: int, item: int, look: int) -> tuple[str, str, str, str]:
    return NAMES[name], COLOURS[look // len(PLACES)], OBJECTS[item], PLACES[look % len(PLACES)]


def _pick(fact: np.ndarray, word: np.ndarray) -> np.ndarray:
    return np.take_along_axis(fact, np.minimum(word, 3)[..., None], -1)[..., 0]


@cache
def _number(kind: tuple[str, ...]) -> int:
    """The number of its first word."""
    return FactWorld().words.index(kind[0])
