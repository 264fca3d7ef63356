"""What the ports and their plain counterparts share: generated data, and small models. Nothing is downloaded."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from lockstep.recipes.char_lm.data import SYMBOLS, encode, library_text
from lockstep.recipes.char_lm.model import GPT

CONTEXT = 32


# ---- text: Python's own standard library ----


class Crops(Dataset):
    """Every window of `CONTEXT` characters of a text, and the same window one character later."""

    def __init__(self, ids: Tensor):
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids) - CONTEXT

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        window = self.ids[start : start + CONTEXT + 1].long()
        return window[:-1], window[1:]


def texts() -> tuple[Tensor, Tensor]:
    """Return the character ids of the training text, and of the validation text."""
    ids = encode(library_text(60_000))
    return ids[:54_000], ids[54_000:54_320]


def small_gpt() -> nn.Module:
    return GPT(len(SYMBOLS), width=32, layers=2, heads=2, context=CONTEXT)


def blocks(ids: Tensor) -> list[dict[str, list[int]]]:
    """Return the text as blocks of `CONTEXT` tokens, as transformers' example groups its texts."""
    count = min(len(ids) // CONTEXT, 96)
    rows = ids[: count * CONTEXT].view(count, CONTEXT).tolist()
    return [{"input_ids": row, "labels": row} for row in rows]


def gpt2_config():
    """Return the config of a tiny GPT-2. Dropout is off, so that two programs can be compared."""
    from transformers import GPT2Config

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2Config(vocab_size=len(SYMBOLS), n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=2, **off)


# ---- pictures ----


def pictures(count: int, seed: int) -> TensorDataset:
    """Noisy stripes, (count, 3, 16, 16); the class, one of 8, is their direction."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(8, (count,), generator=generator)
    angles = labels * torch.pi / 8
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    waves = torch.sin(torch.cos(angles)[:, None, None] * columns + torch.sin(angles)[:, None, None] * rows)
    noise = torch.randn(count, 3, 16, 16, generator=generator)
    return TensorDataset(waves[:, None] + noise, labels)


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.branch(x) + self.shortcut(x))


def small_resnet() -> nn.Module:
    return nn.Sequential(Residual(3, 8), Residual(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8))


def small_vit() -> nn.Module:
    import timm

    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", num_classes=8, **sizes)
