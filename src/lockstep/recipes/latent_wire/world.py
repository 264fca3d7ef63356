"""A small world of facts, and three ways to write its words as token ids.

Sample i of a split is a function of (seed, split, i) alone: any rank makes any sample, nothing is stored.
Every text of a kind has one length in tokens, so that batches need no padding.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.utils.data import Dataset

NAMES = ("anna", "boris", "clara", "dmitri", "elena", "felix", "greta", "hugo")
COLOURS = ("red", "green", "blue", "yellow", "purple", "white")
OBJECTS = ("ball", "chair", "drum", "flute", "glove", "hammer", "lamp", "mirror")
PLACES = ("attic", "barn", "cellar", "garden", "kitchen", "office")
ASKED = ("colour", "item", "place", "who")
MARKS = (".", "?")
WORDS = NAMES + COLOURS + OBJECTS + PLACES + ASKED + MARKS

KINDS = len(ASKED)
LONGEST = max(map(len, WORDS)) + 1  # a blank ends every word
HELD_OUT = 10


@dataclass(frozen=True)
class Fact:
    name: str
    colour: str
    item: str
    place: str

    @property
    def words(self) -> list[str]:
        return [self.name, self.colour, self.item, self.place, "."]

    @property
    def held_out(self) -> bool:
        """Whether it is never trained on: one in ten, by its words."""
        return zlib.crc32(" ".join(self.words).encode()) % HELD_OUT == 0

    def question(self, kind: int) -> tuple[list[str], str]:
        """What is asked, and the one word that answers it."""
        if ASKED[kind] == "who":
            return ["who", self.item, "?"], self.name
        return [ASKED[kind], self.name, "?"], (self.colour, self.item, self.place)[kind]


@dataclass(frozen=True)
class Sample:
    facts: tuple[Fact, ...]
    questions: tuple[tuple[list[str], str], ...]

    @property
    def context(self) -> list[str]:
        return [word for fact in self.facts for word in fact.words]


@dataclass(frozen=True)
class FactWorld:
    """Contexts of `facts` facts about different people and things, and `questions` different questions about each."""

    facts: int = 1
    questions: int = 2
    seed: int = 0

    def sample(self, split: str, index: int) -> Sample:
        draw = random.Random(f"{self.seed} {split} {index}")
        facts: list[Fact] = []
        while len(facts) < self.facts:  # about people and things of whom nothing has been said yet
            fact = Fact(*map(draw.choice, (NAMES, COLOURS, OBJECTS, PLACES)))
            known = any(fact.name == other.name or fact.item == other.item for other in facts)
            if not known and fact.held_out == (split == "test"):
                facts.append(fact)
        asked = draw.sample(range(self.facts * KINDS), self.questions)
        return Sample(tuple(facts), tuple(facts[place // KINDS].question(place % KINDS) for place in asked))


# ---- tokens ----


class Tokenizer:
    """Words to ids. 0 begins every sequence."""

    size: int

    def encode(self, words: Sequence[str]) -> Tensor:
        return torch.tensor([i for word in words for i in self.ids(word)], dtype=torch.int64)

    def ids(self, word: str) -> list[int]:
        raise NotImplementedError


class WholeWords(Tokenizer):
    """One token per word, numbered in a shuffled order."""

    def __init__(self) -> None:
        order = torch.randperm(len(WORDS), generator=torch.Generator().manual_seed(1)).tolist()
        self._ids = {word: 1 + i for word, i in zip(WORDS, order, strict=True)}
        self.size = 1 + len(WORDS)

    def ids(self, word: str) -> list[int]:
        return [self._ids[word]]


class SplitWords(Tokenizer):
    """The first letter, and the rest of the word: two tokens; a mark is one."""

    def __init__(self) -> None:
        pieces = sorted({piece for word in WORDS for piece in self._pieces(word)})
        self._ids = {piece: 1 + i for i, piece in enumerate(pieces)}
        self.size = 1 + len(pieces)

    def ids(self, word: str) -> list[int]:
        return [self._ids[piece] for piece in self._pieces(word)]

    @staticmethod
    def _pieces(word: str) -> list[str]:
        return [word] if word in MARKS else [word[0], "-" + word[1:]]


class Bytes(Tokenizer):
    """Every word filled up with blanks to one length, byte by byte."""

    size = 256

    def ids(self, word: str) -> list[int]:
        return list(word.ljust(LONGEST).encode("ascii"))


TOKENIZERS = {"words": WholeWords, "pieces": SplitWords, "bytes": Bytes}


class FactData(Dataset[dict[str, Tensor]]):
    """Samples as tensors: what the wire reads, and for every reader what it is asked, in its own tokens.

    `other` is the context of the next sample: a wire that carries it must not answer this one's questions.
    """

    def __init__(self, world: FactWorld, split: str, length: int, tokenizers: Sequence[Tokenizer]):
        self.world, self.split, self.length, self.tokenizers = world, split, length, tokenizers

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.world.sample(self.split, index)
        other = self.world.sample(self.split, (index + 1) % self.length)
        found = {"context": self.bytes.encode(sample.context), "other": self.bytes.encode(other.context)}
        for number, tokenizer in enumerate(self.tokenizers):
            found[f"text_{number}"] = tokenizer.encode(sample.context)
            found[f"question_{number}"] = torch.stack([tokenizer.encode(words) for words, _ in sample.questions])
            found[f"answer_{number}"] = torch.stack([tokenizer.encode([word]) for _, word in sample.questions])
        return found

    @cached_property
    def bytes(self) -> Bytes:
        return Bytes()
