"""The models of the lab: small enough for two CPU cores, and standard sizes for a GPU.

The small ones train in seconds, so that an exercise can compare losses; the standard ones have the parameter counts
that the course's tables name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Literal["batch", "group"]


def _norm(kind: Norm, channels: int) -> nn.Module:
    """Return a normalisation: batch statistics, or groups of channels of each picture alone."""
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(8, channels)


def _conv(inputs: int, outputs: int, kernel: int, stride: int, norm: Norm) -> list[nn.Module]:
    """Return a convolution and its norm. The picture gets smaller by the stride, and by nothing else."""
    return [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), _norm(norm, outputs)]


class Residual(nn.Module):
    """A block of convolutions, its body, beside a shortcut."""

    def __init__(self, body: list[nn.Module], inputs: int, outputs: int, stride: int, norm: Norm):
        super().__init__()
        self.body = nn.Sequential(*body)

        # A 1x1 convolution resizes the input where the shapes differ.
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_conv(inputs, outputs, 1, stride, norm))

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the block's output: [batch, outputs, height / stride, width / stride]."""
        return F.relu(self.body(pictures) + self.shortcut(pictures))


def _basic(inputs: int, outputs: int, stride: int, norm: Norm) -> Residual:
    """Return a block of two 3x3 convolutions."""
    body = [*_conv(inputs, outputs, 3, stride, norm), nn.ReLU(), *_conv(outputs, outputs, 3, 1, norm)]
    return Residual(body, inputs, outputs, stride, norm)


def _bottleneck(inputs: int, outputs: int, stride: int, norm: Norm) -> Residual:
    """Return a block with a 3x3 convolution between two 1x1 convolutions, on a quarter of the channels."""
    narrow = outputs // 4
    first = [*_conv(inputs, narrow, 1, 1, norm), nn.ReLU()]
    middle = [*_conv(narrow, narrow, 3, stride, norm), nn.ReLU()]
    return Residual([*first, *middle, *_conv(narrow, outputs, 1, 1, norm)], inputs, outputs, stride, norm)


def _stages(
    block: Callable[..., Residual], inputs: int, channels: list[int], counts: list[int], norm: Norm
) -> list[nn.Module]:
    """Return the blocks of all stages. Each stage but the first halves the picture."""
    blocks: list[nn.Module] = []
    for stage, (outputs, count) in enumerate(zip(channels, counts, strict=True)):
        for index in range(count):
            # Only the first block of a stage has a stride.
            blocks.append(block(inputs, outputs, 2 if index == 0 and stage > 0 else 1, norm))
            inputs = outputs

    return blocks


def resnet_tiny(classes: int = 8, *, norm: Norm = "batch") -> nn.Sequential:
    """Return a residual network of 0.18 million parameters for 32x32 pictures."""
    blocks = _stages(_basic, 16, [16, 32, 64], [2, 2, 2], norm)
    stem = [*_conv(3, 16, 3, 1, norm), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def resnet18(classes: int = 1000, *, norm: Norm = "batch") -> nn.Sequential:
    """Return ResNet-18: 11.7 million parameters for 1,000 classes."""
    return _large(_stages(_basic, 64, [64, 128, 256, 512], [2, 2, 2, 2], norm), 512, classes, norm)


def resnet50(classes: int = 1000, *, norm: Norm = "batch") -> nn.Sequential:
    """Return ResNet-50: 25.6 million parameters for 1,000 classes."""
    return _large(_stages(_bottleneck, 64, [256, 512, 1024, 2048], [3, 4, 6, 3], norm), 2048, classes, norm)


def _large(blocks: list[nn.Module], channels: int, classes: int, norm: Norm) -> nn.Sequential:
    """Return a network for large pictures: its stem reduces 224x224 to 56x56. The last block gives `channels`."""
    stem = [*_conv(3, 64, 7, 2, norm), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Block(nn.Module):
    """One layer of a GPT: causal self-attention, then an MLP, each after a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [batch, length, width], like `tokens`."""
        batch, length, width = tokens.shape

        # [3, batch, heads, length, channels of a head]
        qkv = self.qkv(self.attention_norm(tokens)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)

        tokens = tokens + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return tokens + self.mlp(self.mlp_norm(tokens))


class GPT(nn.Module):
    """A decoder-only transformer. `blocks` is the list that FSDP shards and a pipeline splits."""

    def __init__(self, *, layers: int, width: int, heads: int, symbols: int = 64, length: int = 64):
        super().__init__()
        self.embedding, self.position = nn.Embedding(symbols, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols, bias=False)

    def forward(self, symbols: Tensor) -> Tensor:
        """Return the logits of the next symbols, [batch, length, symbols], for symbols [batch, length]."""
        tokens = self.embedding(symbols) + self.position(torch.arange(symbols.shape[1], device=symbols.device))

        for block in self.blocks:
            tokens = block(tokens)

        return self.head(self.norm(tokens))


def gpt_tiny() -> GPT:
    """Return a GPT of 4 layers and width 128: 0.8 million parameters."""
    return GPT(layers=4, width=128, heads=4)


def gpt(layers: int, *, width: int, symbols: int = 64, length: int = 64) -> GPT:
    """Return a GPT of any size, with heads of 64 channels."""
    return GPT(layers=layers, width=width, heads=max(1, width // 64), symbols=symbols, length=length)


def mlp_wide(width: int = 512, layers: int = 4, classes: int = 8) -> nn.Sequential:
    """Return an MLP for vectors of `width`: many parameters and little compute, so that communication shows."""
    hidden: list[nn.Module] = []
    for _ in range(layers):
        hidden += [nn.Linear(width, width), nn.ReLU()]

    return nn.Sequential(*hidden, nn.Linear(width, classes))


def language_loss(model: nn.Module, text: Tensor) -> Tensor:
    """Return the mean cross-entropy of each next symbol, for text [batch, length + 1] of `MarkovText`."""
    logits = model(text[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
