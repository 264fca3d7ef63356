"""Samples as tensors: the bytes that the wire carries, and the questions and answers in the tokens of every reader.

There are three tokenizers. Every text of a kind has the same number of tokens, so batches need no padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from lockstep.recipes.latent_wire.worlds import MARKS, Drawn, World

MODES = ("context", "prompt")
WORD_BYTES = 8  # the bytes of a word for the tokenizer `bytes`, including at least one blank at the end
Batch = dict[str, torch.Tensor]


class Tokenizer:
    """A map from numbers of words to the token ids 0 to `size` - 1. Id 0 begins every sequence."""

    def __init__(self, words: Sequence[str], ids: Sequence[Sequence[int]], size: int, blank: int | None = None):
        assert len(words) == len(set(words)) == len(set(map(tuple, ids)))
        self.size = size
        self.blank = blank  # an id that only pads words
        self.lengths = np.array([len(tokens) for tokens in ids])  # tokens of each word
        self.table = np.array([[*tokens, *[0] * (self.lengths.max() - len(tokens))] for tokens in ids])

    def used(self, words: np.ndarray) -> np.ndarray:
        """Return which entries of the table's rows for `words` (words,) are tokens: a mark has fewer than a word."""
        return self.lengths[words][:, None] > np.arange(self.table.shape[1])

    def encode(self, numbers: np.ndarray) -> np.ndarray:
        """Map words (..., words) to tokens (..., tokens)."""
        flat = numbers.reshape(-1, numbers.shape[-1])
        # All rows have their marks in the same positions, so the first one decides.
        return self.table[flat][:, self.used(flat[0])].reshape(*numbers.shape[:-1], -1)


def whole_words(words: Sequence[str]) -> Tokenizer:
    """Make one token of each word, numbered in a shuffled order."""
    order = np.random.RandomState(1).permutation(len(words)) + 1
    return Tokenizer(words, order[:, None].tolist(), size=1 + len(words))


def split_words(words: Sequence[str]) -> Tokenizer:
    """Make two tokens of each word, its first letter and the rest. A mark is one token."""
    # A piece that is not the first has a dash, so that "a" and the rest of "ba" differ.
    pieces = [[word] if word in MARKS else [word[0], "-" + word[1:]] for word in words]
    number = {piece: 1 + index for index, piece in enumerate(sorted({*itertools.chain(*pieces)}))}
    return Tokenizer(words, [[number[piece] for piece in split] for split in pieces], size=1 + len(number))


def byte_words(words: Sequence[str]) -> Tokenizer:
    """Make one token of each byte. Every word is padded with blanks to the same length."""
    assert max(map(len, words)) < WORD_BYTES
    return Tokenizer(words, [[*word.ljust(WORD_BYTES).encode("ascii")] for word in words], size=256, blank=ord(" "))


TOKENIZERS = {"words": whole_words, "pieces": split_words, "bytes": byte_words}


class WireData(torch.utils.data.Dataset[Batch]):
    """Batches for the wire and for every reader.

    `context` is what the wire carries, in bytes. In mode `context` that is the context (N, bytes), and the question
    reaches the readers as text. In mode `prompt` it is the context and the question (N, questions, bytes), and the
    readers get only a question mark. `other` is the same with the context of the next sample, a control: it must not
    answer this sample's questions.

    For reader n, `text_n`, `question_n` and `answer_n` are the tokens of the context, the questions and the answers,
    and `after_n` are those that it reads after the wire.
    """

    def __init__(self, world: World, split: str, length: int, tokenizers: Sequence[Tokenizer], mode: str = MODES[0]):
        self.world = world
        self.split = split
        self.length = length
        self.tokenizers = tokenizers
        self.mode = mode
        self.bytes = byte_words(world.words)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        return {name: tensor[0] for name, tensor in self.__getitems__([index]).items()}

    def __getitems__(self, ids: Sequence[int]) -> Batch:
        """Make a batch at once, which takes hardly longer than one sample."""
        numbers = np.asarray(ids, np.int64)
        drawn = self.world.draw(self.split, numbers)
        neighbour = self.world.draw(self.split, (numbers + 1) % self.length)
        # The questions of `other` are still this sample's own.
        batch = {"context": self._carried(drawn.context, drawn), "other": self._carried(neighbour.context, drawn)}

        # In mode `prompt` only a question mark follows the wire.
        mark = np.full((*drawn.answer.shape, 1), self.world.words.index(MARKS[1]))
        for number, tokenizer in enumerate(self.tokenizers):
            batch |= {
                f"text_{number}": tokenizer.encode(drawn.context),
                f"question_{number}": tokenizer.encode(drawn.question),
                f"answer_{number}": tokenizer.encode(drawn.answer[..., None]),
                f"after_{number}": tokenizer.encode(drawn.question if self.mode == "context" else mark),
            }

        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in batch.items()}

    def _carried(self, context: np.ndarray, asked: Drawn) -> np.ndarray:
        """Return the bytes that the wire carries: of `context` (N, C), and in mode `prompt` also of each question."""
        if self.mode == "context":
            return self.bytes.encode(context)

        shape = (*asked.answer.shape, context.shape[-1])
        return self.bytes.encode(np.concatenate([np.broadcast_to(context[:, None], shape), asked.question], -1))


def collate(samples: list[Batch] | Batch) -> Batch:
    """Stack samples. A batch that was made at once is left as it is."""
    return samples if isinstance(samples, dict) else torch.utils.data.default_collate(samples)
