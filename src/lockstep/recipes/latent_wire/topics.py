"""A world of sentences: which topic do most of their telling words belong to?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.recipes.latent_wire.draws import pick, uniform
from lockstep.recipes.latent_wire.world import Drawn, World

KEYWORDS = {
    "sport": "goal team coach race score match player medal league tennis jersey referee",
    "food": "bread soup spice butter oven recipe cheese salad honey onion pepper dessert",
    "music": "violin chorus melody piano rhythm concert guitar lyrics album singer tempo opera",
    "space": "orbit comet rocket planet galaxy moon meteor probe crater eclipse solar nebula",
    "health": "doctor nurse fever clinic vaccine muscle therapy remedy virus wound surgery pulse",
    "money": "bank loan market profit stock budget tax wage credit invoice coin pension",
}
TOPICS = tuple(KEYWORDS)
TELLING = tuple(word for words in KEYWORDS.values() for word in words.split())
NEUTRAL = (
    "the", "a", "an", "of", "in", "on", "at", "to", "and", "but", "with", "from", "for", "after", "before", "again",
    "often", "today", "then", "some", "many", "this", "that", "near",
)  # fmt: skip
ASK, MARK, BLANK = "topic", "?", "--"
SHORTEST, LONGEST = 12, 20  # words of a sentence; shorter ones are filled up with blanks
LEADING = (3, 5)  # words of the topic
STRAY = 6  # at most so many of other topics, two of each
EACH = len(TELLING) // len(TOPICS)


@dataclass(frozen=True)
class TopicWorld:
    """Sentences of 12 to 20 words. Three to five of them belong to its topic, and at most two to any other."""

    seed: int = 0
    questions: int = 1

    @property
    def words(self) -> tuple[str, ...]:
        return (*TELLING, *NEUTRAL, *TOPICS, ASK, MARK, BLANK)

    def draw(self, split: str, ids: np.ndarray) -> Drawn:
        others = 2 * (len(TOPICS) - 1)
        u = uniform(self.seed, split, ids, 4 + EACH + others + 2 * LONGEST)
        sizes, rest = u[:, :4], u[:, 4:]
        by_word, by_stray, which, order = np.split(rest, np.cumsum([EACH, others, LONGEST]), axis=1)
        topic = (sizes[:, 0] * len(TOPICS)).astype(np.int64)
        length = _between(SHORTEST, LONGEST, sizes[:, 1:2])
        leading = _between(*LEADING, sizes[:, 2:3])
        stray = _between(0, STRAY, sizes[:, 3:4])
        place = np.arange(LONGEST)
        strays = (topic[:, None] + 1 + pick(by_stray, others) // 2) % len(TOPICS)  # each other topic twice
        word_of = (which * EACH).astype(np.int64)
        own = topic[:, None] * EACH + pick(by_word, LEADING[1])
        words = len(TELLING) + (which * len(NEUTRAL)).astype(np.int64)
        _put(words, place < leading, np.pad(own, ((0, 0), (0, LONGEST - own.shape[1]))))
        at_stray = (place >= leading) & (place < leading + stray)
        turn = np.clip(place - leading, 0, others - 1)
        _put(words, at_stray, np.take_along_axis(strays, turn, 1) * EACH + word_of)
        blank = place >= length
        shuffled = np.where(blank, 1.0 + place, order).argsort(-1)  # blanks stay behind
        _put(words, blank, np.full_like(words, self.words.index(BLANK)))
        question = np.array([self.words.index(ASK), self.words.index(MARK)])
        return Drawn(
            np.take_along_axis(words, shuffled, 1),
            np.broadcast_to(question, (len(ids), 1, 2)),
            self.words.index(TOPICS[0]) + topic[:, None],
        )

    def easier(self) -> Sequence[World]:
        return []


def _between(low: int, high: int, number: np.ndarray) -> np.ndarray:
    return low + (number * (high - low + 1)).astype(np.int64)


def _put(words: np.ndarray, where: np.ndarray, values: np.ndarray) -> None:
    words[where] = values[where]
