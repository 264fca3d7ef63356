"""Tasks with nothing wrong, however unusual: `lockstep verify` must not raise an alarm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from lockstep import Loss
from lockstep.task import RunView
from zoo.base import LENGTH, WORDS, Reader, Sentences, Sound, token_losses


class Dropped(Reader):
    def read(self, tokens: Tensor) -> Tensor:
        return F.dropout(super().read(tokens), 0.3, self.training)


class TiedHead(Dropped):
    def __init__(self) -> None:
        super().__init__()
        self.out.weight = self.embedding.weight


class TiedWithDropout(Sound):
    """Adam, clipping, a schedule; the head is the embedding."""

    defaults = Sound.defaults | {"clip": {"norm": 0.5}, "lr": {"schedule": "cosine", "warmup": 2}}

    def model(self) -> nn.Module:
        return TiedHead()

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(WORDS, 8), nn.LSTM(8, 8, batch_first=True)
        self.out = nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.cell(self.embedding(tokens))[0])


class AugmentedLSTM(Sound):
    """Augmentation from the seeded generators, a moving average in the right place, metrics that are sums."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}

    def model(self) -> nn.Module:
        return Recurrent()

    def data(self) -> Any:
        return Dropping()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, mask = batch
        logits = model(tokens[:, :-1])
        losses = token_losses(logits, tokens, mask)
        right = (logits.argmax(-1) == tokens[:, 1:])[mask].sum()
        return Loss(losses.sum(), len(losses), {"accuracy": right})

    def after_step(self, run: Any, result: Any) -> None:
        for name, p in run.model.named_parameters():
            self.average[name] = self.average.get(name, torch.zeros_like(p)).lerp(p.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state["average"]


class Dropping(Sentences):
    """ControlWord dropout from torch's generator, which is seeded for every sample."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, mask = super().__getitem__(index)
        return tokens * (torch.rand(len(tokens)) > 0.2), mask


class FrozenTrunk(Sound):
    """A frozen BatchNorm in eval mode, a frozen layer, GroupNorm where it learns."""

    def model(self) -> nn.Module:
        trunk = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)).requires_grad_(False)
        trunk[1].train = lambda mode=True: trunk[1]  # pyrefly: ignore
        trunk[1].training = False
        head = nn.Sequential(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
        return nn.Sequential(trunk, head)

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def data(self) -> Any:
        g = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(22, 1, 8, 8, generator=g), torch.randint(0, 3, (22,), generator=g))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


class Text(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        sentences = Sentences(64)
        yield from (sentences[index] for index in range(64))


class PlainStream(Sound):
    """A stream that Lockstep assigns to the ranks; with dropout, so that its cut matters."""

    def model(self) -> nn.Module:
        return Dropped()

    def data(self) -> Any:
        return Text()


class Noising(Sound):
    """Denoising with noise of the model's own stream, in eval mode too."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, mask = batch
        keep = torch.rand(tokens[:, :-1].shape) > 0.2
        losses = token_losses(model(tokens[:, :-1] * keep), tokens, mask)
        return Loss(losses.sum(), len(losses))


class Pairs(Dataset):
    """(source, target) of different lengths; padded by the task's collate."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        sizes = torch.randint(3, 8, (22,), generator=g).tolist()
        self.rows = [torch.randint(1, WORDS, (size,), generator=g) for size in sizes]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Translator(nn.Module):
    """torch's own nn.Transformer, with its dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(WORDS, 8, padding_idx=0), nn.Linear(8, WORDS)
        self.core = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        read = self.core(self.embedding(source), self.embedding(target), tgt_mask=mask, tgt_is_causal=True)
        return self.out(read)


class TorchTransformer(Sound):
    """Batches are padded to their longest row, so the shapes depend on the cut."""

    def model(self) -> nn.Module:
        return Translator()

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def data(self) -> Any:
        return Pairs()

    def collate(self, samples: list[Any]) -> Any:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        source = batch[:, :3]  # the same for every row: padding is in the target only
        logits = model(source, batch[:, :-1]).flatten(0, 1)
        target = batch[:, 1:].flatten()
        total = F.cross_entropy(logits, target, ignore_index=0, reduction="sum")
        return Loss(total, int((target != 0).sum()))


class Contrastive(Sound):
    """Every other sentence of the global batch is a negative."""

    defaults = {"checks.loss": "batch-coupled"}

    def before_training(self, run: RunView) -> None:
        self.run = run

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        tokens, _ = batch
        words = model(tokens[:, :-1])
        first, second = words[:, :3].mean(1), self.gathered(words[:, 3:].mean(1))
        labels = self.first() + torch.arange(len(tokens))
        return Loss(F.cross_entropy(first @ second.T, labels, reduction="sum"), len(tokens))

    def gathered(self, rows: Tensor) -> Tensor:
        return self.run.all_gather(rows)

    def first(self) -> int:
        """Return the place of the first label. It is called after the gather."""
        return self.run.row_offset


TASKS = [TiedWithDropout, AugmentedLSTM, FrozenTrunk, PlainStream, Noising, TorchTransformer, Sound, Contrastive]
assert LENGTH < WORDS
