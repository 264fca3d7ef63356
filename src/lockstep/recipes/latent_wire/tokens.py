"""Three ways to write words as token ids. Every text of a kind has one length in tokens: batches need no padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.recipes.latent_wire.world import MARKS

WORD_BYTES = 8  # a blank ends every word


class Tokenizer:
    """Numbers of words to ids. 0 begins every sequence."""

    size: int
    blank: int | None = None  # an id that only fills up

    def __init__(self, words: Sequence[str], ids: Sequence[Sequence[int]]):
        assert len(words) == len(set(words)) == len(set(map(tuple, ids)))
        self.lengths = np.array([len(one) for one in ids])
        self.table = np.array([[*one, *[0] * (self.lengths.max() - len(one))] for one in ids])

    def encode(self, numbers: np.ndarray) -> np.ndarray:
        """(..., words) to (..., tokens). A mark has fewer tokens than a word, and the same place in every text."""
        flat = numbers.reshape(-1, numbers.shape[-1])
        keep = self.lengths[flat[0]][:, None] > np.arange(self.table.shape[1])
        return self.table[flat][:, keep].reshape(*numbers.shape[:-1], -1)


class WholeWords(Tokenizer):
    """One token per word, numbered in a shuffled order."""

    def __init__(self, words: Sequence[str]):
        order = np.random.RandomState(1).permutation(len(words)) + 1
        super().__init__(words, [[int(i)] for i in order])
        self.size = 1 + len(words)


class SplitWords(Tokenizer):
    """The first letter, and the rest of the word: two tokens; a mark is one."""

    def __init__(self, words: Sequence[str]):
        pieces = [[word] if word in MARKS else [word[0], "-" + word[1:]] for word in words]
        known = sorted({piece for some in pieces for piece in some})
        super().__init__(words, [[1 + known.index(piece) for piece in some] for some in pieces])
        self.size = 1 + len(known)


class Bytes(Tokenizer):
    """Every word filled up with blanks to one length, byte by byte."""

    size = 256
    blank = ord(" ")

    def __init__(self, words: Sequence[str]):
        assert max(map(len, words)) < WORD_BYTES
        super().__init__(words, [list(word.ljust(WORD_BYTES).encode("ascii")) for word in words])


TOKENIZERS: dict[str, type[WholeWords | SplitWords | Bytes]] = {
    "words": WholeWords, "pieces": SplitWords, "bytes": Bytes,
}  # fmt: skip
