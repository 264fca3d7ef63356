"""Samples as tensors: what the wire carries, and for every reader what it is asked, in its own tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.recipes.latent_wire.tokens import Bytes, Tokenizer
from lockstep.recipes.latent_wire.world import MARKS, Drawn, World

MODES = ("context", "prompt")
Batch = dict[str, Tensor]


class WireData(Dataset[Batch]):
    """`context` is what the wire carries, in bytes: with mode `context` (N, bytes) the context, and the question
    reaches the reader as text; with mode `prompt` (N, questions, bytes) the context and the question, and the reader
    gets a question mark. `other` is the same with the context of the next sample: it must not answer this one's.
    """

    def __init__(self, world: World, split: str, length: int, tokenizers: Sequence[Tokenizer], mode: str = MODES[0]):
        self.world, self.split, self.length, self.tokenizers, self.mode = world, split, length, tokenizers, mode
        self.bytes = Bytes(world.words)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        return {name: tensor[0] for name, tensor in self.__getitems__([index]).items()}

    def __getitems__(self, ids: Sequence[int]) -> Batch:
        """A whole batch at once: hardly slower than one sample."""
        numbers = np.asarray(ids, np.int64)
        mine = self.world.draw(self.split, numbers)
        other = self.world.draw(self.split, (numbers + 1) % self.length)
        found = {"context": self._carried(mine.context, mine), "other": self._carried(other.context, mine)}
        mark = np.full((*mine.answer.shape, 1), self.world.words.index(MARKS[1]))
        for number, tokenizer in enumerate(self.tokenizers):
            found[f"text_{number}"] = tokenizer.encode(mine.context)
            found[f"question_{number}"] = tokenizer.encode(mine.question)
            found[f"answer_{number}"] = tokenizer.encode(mine.answer[..., None])
            found[f"after_{number}"] = tokenizer.encode(mine.question if self.mode == "context" else mark)
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in found.items()}

    def _carried(self, context: np.ndarray, asked: Drawn) -> np.ndarray:
        if self.mode == "context":
            return self.bytes.encode(context)
        shape = (*asked.answer.shape, context.shape[-1])
        return self.bytes.encode(np.concatenate([np.broadcast_to(context[:, None], shape), asked.question], -1))


def collate(samples: list[Batch] | Batch) -> Batch:
    """A batch that was read as one is left as it is."""
    return samples if isinstance(samples, dict) else torch.utils.data.default_collate(samples)
