"""Models and data that the three versions of each project share. Everything is generated; nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

# ---- pictures ----


def pictures(count: int, seed: int) -> TensorDataset:
    """Return noisy pictures (count, 1, 8, 8) with a bright bar, and which of four bars it is."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 8, 8, generator=generator)
    y = torch.randint(4, (count,), generator=generator)
    for picture, label in zip(x, y.tolist(), strict=True):
        picture[0, 2 * label : 2 * label + 2] += 0.7
    return TensorDataset(x, y)


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 64, 4),
    )


# ---- a language model ----


def base_model(folder: str = "base") -> str:
    """Write a tiny Llama with random weights to `folder`, unless it is there, and return the folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if not Path(folder, "config.json").exists():
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        torch.manual_seed(0)
        config = LlamaConfig(**sizes, vocab_size=32, bos_token_id=None, eos_token_id=1, pad_token_id=0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def sentences(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Return rows of 3 to 20 tokens, each the previous one plus 3."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(2, 32, (count,), generator=generator).tolist()
    lengths = torch.randint(3, 21, (count,), generator=generator).tolist()
    rows = [[2 + (start + 3 * place) % 30 for place in range(n)] for start, n in zip(starts, lengths, strict=True)]
    return [{"input_ids": row, "labels": row} for row in rows]


# ---- points ----


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs))


def ring(count: int) -> TensorDataset:
    """Return points (count, 2) near the unit circle."""
    generator = torch.Generator().manual_seed(0)
    angle = 2 * torch.pi * torch.rand(count, generator=generator)
    points = torch.stack([angle.cos(), angle.sin()], dim=1)
    return TensorDataset(points + 0.05 * torch.randn(count, 2, generator=generator))


def two_views(count: int) -> TensorDataset:
    """Return pairs of noisy views (count, 16) of the same samples."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(count, 16, generator=generator)
    views = [samples + 0.3 * torch.randn(count, 16, generator=generator) for _ in range(2)]
    return TensorDataset(*views)


# ---- a corpus ----


def corpus(folder: str = "corpus", files: int = 12) -> list[Path]:
    """Write files of JSON lines with texts of 4 to 40 characters, unless they are there, and return their paths."""
    paths = [Path(folder, f"{number:02}.jsonl") for number in range(files)]
    if not paths[-1].exists():
        Path(folder).mkdir(exist_ok=True)
        for number, path in enumerate(paths):
            generator = torch.Generator().manual_seed(number)
            sizes: Tensor = torch.randint(4, 41, (20,), generator=generator)
            texts = [("abcdefgh" * 6)[place % 8 :][: int(size)] for place, size in enumerate(sizes)]
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return paths
