"""A language model on sequences of different lengths. Replace the parts marked YOURS, one at a time.

lockstep train FILE:LanguageModel --nproc 2
lockstep verify FILE:LanguageModel --worlds 1,2
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from lockstep import Loss, Task

TOKENS = 20  # the size of the vocabulary
IGNORED = -100  # the target where a sequence has ended: cross_entropy leaves it out


class LanguageModel(Task):
    unit = "token"  # what a loss weight of 1 counts, for the speed in the log

    # Any setting can be here; the command line overrides it: lr.peak=0.001. All of them: docs/configuration.md.
    defaults = {
        "steps": 60,
        "global_batch": 32,  # sequences, of all processes together: the result does not depend on their number
        "lr": {"peak": 0.005, "schedule": "cosine", "warmup": 5},
        "clip": {"norm": 1.0},
        "evaluate": {"every": 20},
    }

    def __init__(self, *, width: int = 32, layers: int = 1, context: int = 32):
        """YOURS: options of the task, with defaults. `task.width=64` sets one on the command line."""
        self.width = width
        self.layers = layers
        self.context = context

    def model(self) -> nn.Module:
        """YOURS: any module."""
        return Transformer(self.width, self.layers, self.context)

    def data(self) -> Dataset:
        """YOURS: any dataset with `__len__` and `__getitem__`; here each sample is a tensor of token ids (length,)."""
        return GeneratedText(1000, self.context, seed=0)

    def eval_data(self) -> Dataset:
        """YOURS: what to evaluate on. None: no evaluation."""
        return GeneratedText(100, self.context, seed=1)

    def collate(self, samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the inputs and the targets, (batch, longest - 1) each: the target is the next token."""
        inputs = pad_sequence([ids[:-1] for ids in samples], batch_first=True)
        targets = pad_sequence([ids[1:] for ids in samples], batch_first=True, padding_value=IGNORED)
        return inputs, targets

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        """Return the SUM over all tokens that count, and their number: short sequences get their fair share."""
        inputs, targets = batch
        scores = model(inputs).flatten(0, 1)
        total = F.cross_entropy(scores, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return Loss(total, weight=(targets != IGNORED).sum())


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int, context: int):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width)
        self.positions = nn.Embedding(context, width)

        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

        self.head = nn.Linear(width, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores of the next token at each position: (batch, length) -> (batch, length, TOKENS)."""
        length = ids.shape[1]
        hidden = self.tokens(ids) + self.positions(torch.arange(length, device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


class GeneratedText(Dataset):
    """Sequences that count upwards in steps of 1, 2 or 3, modulo the number of tokens."""

    def __init__(self, count: int, context: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(TOKENS, (count,), generator=generator)
        self.strides = torch.randint(1, 4, (count,), generator=generator)
        self.lengths = torch.randint(4, context + 1, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        return (self.starts[index] + self.strides[index] * torch.arange(int(self.lengths[index]))) % TOKENS
