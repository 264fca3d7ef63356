"""Captions as rows of word numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lockstep.errors import UserError

PAD, BOS, EOS = 0, 1, 2
SPECIAL = ("<pad>", "<bos>", "<eos>")


class Words:
    """The words of a kind of caption, and the longest caption they make."""

    def __init__(self, words: Iterable[str], longest: int):
        self.words = (*SPECIAL, *dict.fromkeys(words))
        self.longest = longest  # words, without <bos> and <eos>
        self._number = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    @property
    def length(self) -> int:
        """Positions that a model reads, and the positions that it writes: the words and one mark."""
        return self.longest + 1

    def encode(self, caption: Sequence[str]) -> Tensor:
        """(length + 1,): <bos>, the words, <eos>, and <pad> up to one length for all. int32: embeddings take it."""
        return torch.tensor(self.numbers(caption), dtype=torch.int32)

    def numbers(self, caption: Sequence[str]) -> list[int]:
        if len(caption) > self.longest:
            raise UserError(
                f"captions of at most {self.longest} words", f"{len(caption)}: {' '.join(caption)}", "shorten it"
            )
        if unknown := [word for word in caption if word not in self._number]:
            raise UserError(
                "captions made of known words",
                f"{unknown[0]!r} in {' '.join(caption)!r}",
                "take the words from all captions: Words.of(captions)",
            )
        padding = [PAD] * (self.longest - len(caption))
        return [BOS, *(self._number[word] for word in caption), EOS, *padding]

    def decode(self, ids: Tensor) -> str:
        """The words up to <eos>."""
        numbers = ids.tolist()
        end = numbers.index(EOS) if EOS in numbers else len(numbers)
        return " ".join(self.words[number] if number < len(self.words) else "?" for number in numbers[:end])

    @staticmethod
    def of(captions: Sequence[str]) -> Words:
        """All words of these captions, in the order of the alphabet: the same captions give the same numbers."""
        split = [caption.split() for caption in captions]
        return Words(sorted({word for words in split for word in words}), max(map(len, split), default=1))
