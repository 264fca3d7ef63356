"""Captions as rows of word ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from lockstep.errors import UserError

PAD, BOS, EOS = 0, 1, 2
SPECIAL = ("<pad>", "<bos>", "<eos>")


class Words:
    """The words of a kind of caption, and the length of its longest caption."""

    def __init__(self, words: Iterable[str], longest: int):
        # Every word once, in the order of its first appearance.
        self.words = (*SPECIAL, *dict.fromkeys(words))
        self._id_of = {word: number for number, word in enumerate(self.words)}

        self.longest = longest  # the words of the longest caption, without <bos> and <eos>
        self.length = longest + 1  # positions that a model reads, and positions that it writes: the words and one mark

    @classmethod
    def of(cls, captions: Sequence[str]) -> Words:
        """Take all words of these captions, in alphabetical order: the same captions give the same ids."""
        longest = max((len(caption.split()) for caption in captions), default=1)
        return cls(sorted(set(" ".join(captions).split())), longest)

    def __len__(self) -> int:
        return len(self.words)

    def ids(self, caption: Sequence[str]) -> list[int]:
        """Return <bos>, the words, <eos>, and <pad> up to length + 1."""
        if len(caption) > self.longest:
            raise UserError(
                f"a caption has {len(caption)} words; the longest may have {self.longest}",
                " ".join(caption),
                "shorten it",
            )

        for word in caption:
            if word not in self._id_of:
                raise UserError(
                    f"the caption {' '.join(caption)!r} has the unknown word {word!r}",
                    "",
                    "take the words from all captions: Words.of(captions)",
                )

        # One length for all captions, so that batches have one shape.
        padding = [PAD] * (self.longest - len(caption))
        return [BOS, *(self._id_of[word] for word in caption), EOS, *padding]

    def decode(self, ids: Tensor) -> str:
        """Return the words up to <eos>, with ? for ids that no word has."""
        # A model may have more ids than there are words.
        numbers = ids.tolist()
        end = numbers.index(EOS) if EOS in numbers else len(numbers)
        return " ".join(self.words[number] if number < len(self.words) else "?" for number in numbers[:end])
