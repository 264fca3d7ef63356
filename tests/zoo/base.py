"""What the tasks of the zoo have in common: sentences of different lengths, and a small model that reads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lockstep import Loss, Task

WORDS, LENGTH, SAMPLES = 11, 6, 22  # 22 samples in batches of 8: the third step is short


class Sentences(Dataset):
    """(tokens, which of them count): samples one by one, of different lengths."""

    def __init__(self, samples: int = SAMPLES):
        g = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, WORDS, (samples, LENGTH + 1), generator=g)
        counted = torch.randint(1, LENGTH + 1, (samples,), generator=g)
        self.mask = torch.arange(LENGTH) < counted[:, None]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index], self.mask[index]


class Reader(nn.Module):
    """Embedding, one hidden layer, next word. Subclasses put their mistake between `read` and `out`."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, WORDS, bias=False)

    def read(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.hidden(self.embedding(tokens)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.read(tokens))


def token_losses(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """The losses of the words that count, one by one."""
    each = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return each[mask.flatten()]


class Sound(Task):
    """Nothing is wrong with this one."""

    defaults = {"global_batch": 8, "steps": 30}

    def model(self) -> nn.Module:
        return Reader()

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def data(self) -> Any:
        return Sentences()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, mask = batch
        losses = token_losses(model(tokens[:, :-1]), tokens, mask)
        return Loss(losses.sum(), weight=len(losses))
