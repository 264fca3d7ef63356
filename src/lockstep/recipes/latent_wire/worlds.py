"""Generated worlds: contexts, questions about them, and their answers.

Sample i of a split is a function of (seed, split, i) alone: any rank can make any sample, and nothing is stored.
Samples are drawn many at a time, as numbers of words.

Shapes in comments: N samples, C words of context, Q questions each, F facts.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache

import numpy as np

MARKS = (".", "?")


@dataclass(frozen=True)
class Drawn:
    """Samples as numbers of words."""

    context: np.ndarray  # (N, C)
    question: np.ndarray  # (N, Q, words)
    answer: np.ndarray  # (N, Q)


# ---- random numbers -------------------------------------------------------------------------------------

STRIDE = np.uint64(0x9E3779B97F4A7C15)


def uniform(seed: int, split: str, ids: np.ndarray, count: int) -> np.ndarray:
    """Return `count` numbers in [0, 1) for each sample: (N, count).

    They depend on nothing but their key, so they are the same on any rank and in any order.
    """
    stream = np.array([zlib.crc32(f"{seed} {split}".encode())], np.uint64) << np.uint64(32)
    # Mixed twice: neighbouring samples and neighbouring numbers of a sample must not resemble each other.
    sample = _mix(ids.astype(np.uint64) + _mix(stream))
    numbers = _mix(sample[:, None] + np.arange(1, count + 1, dtype=np.uint64) * STRIDE)
    # The upper 53 bits, which a float64 holds exactly.
    return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """Spread every bit over all 64 (splitmix64). Every step can be inverted, so different keys stay different."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def pick(numbers: np.ndarray, count: int) -> np.ndarray:
    """Return `count` indices of the last axis in random order, without repetition."""
    return numbers.argsort(-1)[..., :count]


# ---- facts ----------------------------------------------------------------------------------------------

NAMES = ("anna", "boris", "clara", "dmitri", "elena", "felix", "greta", "hugo")
COLOURS = ("red", "green", "blue", "yellow", "purple", "white")
OBJECTS = ("ball", "chair", "drum", "flute", "glove", "hammer", "lamp", "mirror")
PLACES = ("attic", "barn", "cellar", "garden", "kitchen", "office")
ASKED = ("colour", "item", "place", "who")
KINDS = len(ASKED)  # the kinds of questions about one fact

# A look is a colour and a place: the ways in which a person can have a thing. No two splits share one.
LOOKS = len(COLOURS) * len(PLACES)
SPLITS = {"test": slice(0, 4), "validation": slice(4, 6), "train": slice(6, None)}


@dataclass(frozen=True)
class FactWorld:
    """Contexts of `facts` facts about different people and things, and `questions` different questions about each."""

    facts: int = 1
    questions: int = 2
    seed: int = 0

    @property
    def words(self) -> tuple[str, ...]:
        """All words. A word is stored as its index here."""
        return NAMES + COLOURS + OBJECTS + PLACES + ASKED + MARKS

    def draw(self, split: str, ids: np.ndarray) -> Drawn:
        """Return the samples `ids` (N,) of a split."""
        facts, people, things = self.facts, len(NAMES), len(OBJECTS)
        numbers = uniform(self.seed, split, ids, people + things + facts + facts * KINDS)
        by_name, by_item, by_look, by_question = np.split(numbers, np.cumsum([people, things, facts]), axis=1)

        # The facts: different people, different things, and looks that belong to the split.
        name = pick(by_name, facts)  # (N, F)
        item = pick(by_item, facts)  # (N, F)
        looks = looks_of(split)[name, item]  # (N, F, looks)
        look = np.take_along_axis(looks, (by_look * looks.shape[-1]).astype(np.int64)[..., None], -1)[..., 0]

        said = np.stack(
            [
                _index(NAMES) + name,
                _index(COLOURS) + look // len(PLACES),
                _index(OBJECTS) + item,
                _index(PLACES) + look % len(PLACES),
                np.full_like(name, _index(MARKS)),
            ],
            -1,
        )  # (N, F, 5)

        # "who" asks for the person by the thing, the other questions give the person.
        asked = pick(by_question, self.questions)  # (N, Q)
        fact = np.take_along_axis(said, (asked // KINDS)[..., None], 1)  # (N, Q, 5)
        kind = asked % KINDS
        who = kind == ASKED.index("who")
        about = np.where(who, fact[..., 2], fact[..., 0])

        # A fact begins with the person, so kind k asks for word k + 1; "who" is the last kind.
        answer = np.take_along_axis(fact, np.where(who, 0, kind + 1)[..., None], -1)[..., 0]
        question = np.stack([_index(ASKED) + kind, about, np.full_like(kind, _index(MARKS) + 1)], -1)
        return Drawn(said.reshape(len(ids), -1), question, answer)

    def easier(self) -> list[World]:
        """Return the worlds of a curriculum that ends with this one: of one fact, two and four."""
        return [
            FactWorld(count, min(self.questions, KINDS * count), self.seed) for count in (1, 2, 4) if count < self.facts
        ]


@cache
def looks_of(split: str) -> np.ndarray:
    """Return the looks (people, things, looks) of a split. A hash of the words decides which of the 36 belong to it."""
    # For each person and thing all looks in an order of their own; a split takes a part of it.
    every = [
        sorted(range(LOOKS), key=lambda look: zlib.crc32(" ".join(fact_words(name, item, look)).encode()))
        for name in range(len(NAMES))
        for item in range(len(OBJECTS))
    ]
    return np.array(every).reshape(len(NAMES), len(OBJECTS), LOOKS)[..., SPLITS[split]]


def fact_words(name: int, item: int, look: int) -> tuple[str, str, str, str]:
    return NAMES[name], COLOURS[look // len(PLACES)], OBJECTS[item], PLACES[look % len(PLACES)]


@cache
def _index(kind: tuple[str, ...]) -> int:
    return FactWorld().words.index(kind[0])


# ---- topics ---------------------------------------------------------------------------------------------

KEYWORDS = {
    "sport": "goal team coach race score match player medal league tennis jersey referee",
    "food": "bread soup spice butter oven recipe cheese salad honey onion pepper dessert",
    "music": "violin chorus melody piano rhythm concert guitar lyrics album singer tempo opera",
    "space": "orbit comet rocket planet galaxy moon meteor probe crater eclipse solar nebula",
    "health": "doctor nurse fever clinic vaccine muscle therapy remedy virus wound surgery pulse",
    "money": "bank loan market profit stock budget tax wage credit invoice coin pension",
}
TOPICS = tuple(KEYWORDS)
TELLING = tuple(word for words in KEYWORDS.values() for word in words.split())  # words that belong to a topic
NEUTRAL = (
    "the", "a", "an", "of", "in", "on", "at", "to", "and", "but", "with", "from", "for", "after", "before", "again",
    "often", "today", "then", "some", "many", "this", "that", "near",
)  # fmt: skip
ASK, MARK, BLANK = "topic", "?", "--"
SHORTEST, LONGEST = 12, 20  # words of a sentence; shorter ones are filled up with blanks
LEADING = (3, 5)  # the fewest and the most words of the sentence's topic
STRAY = 6  # a text has at most this many words of other topics, two of each
EACH = len(TELLING) // len(TOPICS)  # words of a topic


@dataclass(frozen=True)
class TopicWorld:
    """Sentences of 12 to 20 words. Three to five of them belong to its topic, and at most two to any other."""

    seed: int = 0
    questions: int = 1

    @property
    def words(self) -> tuple[str, ...]:
        return (*TELLING, *NEUTRAL, *TOPICS, ASK, MARK, BLANK)

    def draw(self, split: str, ids: np.ndarray) -> Drawn:
        others = 2 * (len(TOPICS) - 1)  # each other topic twice
        u = uniform(self.seed, split, ids, 4 + EACH + others + 2 * LONGEST)
        # Every sample takes the same amount of random numbers, whatever its length.
        sizes, rest = u[:, :4], u[:, 4:]
        by_word, by_stray, which, order = np.split(rest, np.cumsum([EACH, others, LONGEST]), axis=1)
        topic = (sizes[:, 0] * len(TOPICS)).astype(np.int64)
        length = _between(SHORTEST, LONGEST, sizes[:, 1:2])
        leading = _between(*LEADING, sizes[:, 2:3])
        stray = _between(0, STRAY, sizes[:, 3:4])

        # Neutral words everywhere; then the topic's own words at the front, then words of other topics.
        position = np.arange(LONGEST)
        words = len(TELLING) + (which * len(NEUTRAL)).astype(np.int64)  # (N, LONGEST)
        own = topic[:, None] * EACH + pick(by_word, LEADING[1])
        words = np.where(position < leading, np.pad(own, ((0, 0), (0, LONGEST - own.shape[1]))), words)

        # Strays take the other topics in a random order, each of them twice.
        stray_topic = (topic[:, None] + 1 + pick(by_stray, others) // 2) % len(TOPICS)
        turn = np.clip(position - leading, 0, others - 1)
        stray_word = np.take_along_axis(stray_topic, turn, 1) * EACH + (which * EACH).astype(np.int64)
        words = np.where((position >= leading) & (position < leading + stray), stray_word, words)

        # The words are shuffled; the blanks that fill up a short sentence stay after them.
        blank = position >= length
        shuffled = np.where(blank, 1.0 + position, order).argsort(-1)
        words = np.where(blank, self.words.index(BLANK), words)

        question = np.array([self.words.index(ASK), self.words.index(MARK)])
        return Drawn(
            np.take_along_axis(words, shuffled, 1),
            np.broadcast_to(question, (len(ids), 1, 2)),
            self.words.index(TOPICS[0]) + topic[:, None],
        )

    def easier(self) -> list[World]:
        return []


World = FactWorld | TopicWorld


def _between(low: int, high: int, number: np.ndarray) -> np.ndarray:
    """Map numbers in [0, 1) to the integers from `low` to `high`."""
    return low + (number * (high - low + 1)).astype(np.int64)
