"""Samples as tensors: the bytes that the wire carries, and the questions and answers in the tokens of every reader.

There are three tokenizers. Every text of a kind has the same number of tokens, so batches need no padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.recipes.latent_wire.worlds import MARKS, Drawn, World

MODES = ("context", "prompt")
WORD_BYTES = 8  # of the tokenizer Bytes, including at least one blank at the end
Batch = dict[str, Tensor]


# ---- tokenizers -----------------------------------------------------------------------------------------


class Tokenizer:
    """A map from numbers of words to token ids. Id 0 begins every sequence."""

    size: int
    blank: int | None = None  # an id that only pads words

    def __init__(self, words: Sequence[str], ids: Sequence[Sequence[int]]):
        assert len(words) == len(set(words)) == len(set(map(tuple, ids)))
        self.lengths = np.array([len(one) for one in ids])  # tokens of each word
        self.table = np.array([[*one, *[0] * (self.lengths.max() - len(one))] for one in ids])

    def encode(self, numbers: np.ndarray) -> np.ndarray:
        """Map words (..., words) to tokens (..., tokens).

        A mark has fewer tokens than a word. All rows have their marks in the same positions, so the first one decides.
        """
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
    """Two tokens per word, its first letter and the rest. A mark is one token."""

    def __init__(self, words: Sequence[str]):
        # A piece that is not the first has a dash, so that "a" and the rest of "ba" differ.
        pieces = [[word] if word in MARKS else [word[0], "-" + word[1:]] for word in words]
        known = sorted({piece for some in pieces for piece in some})
        super().__init__(words, [[1 + known.index(piece) for piece in some] for some in pieces])
        self.size = 1 + len(known)


class Bytes(Tokenizer):
    """One token per byte. Every word is padded with blanks to the same length."""

    size = 256
    blank = ord(" ")

    def __init__(self, words: Sequence[str]):
        assert max(map(len, words)) < WORD_BYTES
        super().__init__(words, [list(word.ljust(WORD_BYTES).encode("ascii")) for word in words])


TOKENIZERS: dict[str, type[WholeWords | SplitWords | Bytes]] = {
    "words": WholeWords,
    "pieces": SplitWords,
    "bytes": Bytes,
}


# ---- the dataset ----------------------------------------------------------------------------------------


class WireData(Dataset[Batch]):
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
        self.bytes = Bytes(world.words)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        return {name: tensor[0] for name, tensor in self.__getitems__([index]).items()}

    def __getitems__(self, ids: Sequence[int]) -> Batch:
        """Make a batch at once, which takes hardly longer than one sample."""
        # The questions of `other` are still this sample's own.
        numbers = np.asarray(ids, np.int64)
        mine = self.world.draw(self.split, numbers)
        other = self.world.draw(self.split, (numbers + 1) % self.length)
        found = {"context": self._carried(mine.context, mine), "other": self._carried(other.context, mine)}

        # What follows the wire in mode `prompt`.
        mark = np.full((*mine.answer.shape, 1), self.world.words.index(MARKS[1]))
        for number, tokenizer in enumerate(self.tokenizers):
            found[f"text_{number}"] = tokenizer.encode(mine.context)
            found[f"question_{number}"] = tokenizer.encode(mine.question)
            found[f"answer_{number}"] = tokenizer.encode(mine.answer[..., None])
            found[f"after_{number}"] = tokenizer.encode(mine.question if self.mode == "context" else mark)
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in found.items()}

    def _carried(self, context: np.ndarray, asked: Drawn) -> np.ndarray:
        """Return the bytes that the wire carries: of `context` (N, C), and in mode `prompt` of each question too."""
        if self.mode == "context":
            return self.bytes.encode(context)
        shape = (*asked.answer.shape, context.shape[-1])
        return self.bytes.encode(np.concatenate([np.broadcast_to(context[:, None], shape), asked.question], -1))


def collate(samples: list[Batch] | Batch) -> Batch:
    """Stack samples. A batch that was made at once is left as it is."""
    return samples if isinstance(samples, dict) else torch.utils.data.default_collate(samples)
