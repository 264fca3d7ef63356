"""The models of the lab: small enough for two CPU cores, and standard sizes for a GPU.

The small ones train in seconds, so that an exercise can compare losses; the standard ones have the parameter counts
that the course's tables name.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Literal["batch", "group"]


def _norm(kind: Norm, channels: int) -> nn.Module:
    """Return a normalisation: batch statistics, or groups of channels of each picture alone."""
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(8, channels)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, channels: int, stride: int, norm: Norm):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, channels, 3, stride, 1, bias=False),
            _norm(norm, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            _norm(norm, channels),
        )
        self.shortcut = _shortcut(inputs, channels, stride, norm)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the block's output: [batch, channels, height / stride, width / stride]."""
        return F.relu(self.body(pictures) + self.shortcut(pictures))


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 convolutions, beside a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, channels: int, stride: int, norm: Norm):
        super().__init__()
        outputs = channels * self.expansion
        self.body = nn.Sequential(
            nn.Conv2d(inputs, channels, 1, bias=False),
            _norm(norm, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, stride, 1, bias=False),
            _norm(norm, channels),
            nn.ReLU(),
            nn.Conv2d(channels, outputs, 1, bias=False),
            _norm(norm, outputs),
        )
        self.shortcut = _shortcut(inputs, outputs, stride, norm)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the block's output: [batch, 4 * channels, height / stride, width / stride]."""
        return F.relu(self.body(pictures) + self.shortcut(pictures))


def _shortcut(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module:
    """Return what is added to a block's output: its input, resized by a 1x1 convolution where the shapes differ."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), _norm(norm, outputs))


def _stages(block: type[BasicBlock | Bottleneck], inputs: int, channels: list[int], counts: list[int], norm: Norm):
    """Return the residual blocks of all stages, and the channels of the last. Each stage but the first halves the
    picture.
    """
    blocks: list[nn.Module] = []
    for stage, (width, count) in enumerate(zip(channels, counts, strict=True)):
        for index in range(count):
            # Only the first block of a stage has a stride.
            stride = 2 if index == 0 and stage > 0 else 1
            blocks.append(block(inputs, width, stride, norm))
            inputs = width * block.expansion

    return blocks, inputs


def resnet_tiny(classes: int = 8, *, norm: Norm = "batch") -> nn.Sequential:
    """Return a residual network of 0.18 million parameters for 32x32 pictures."""
    blocks, outputs = _stages(BasicBlock, 16, [16, 32, 64], [2, 2, 2], norm)
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), _norm(norm, 16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(outputs, classes))


def _resnet(block: type[BasicBlock | Bottleneck], counts: list[int], classes: int, norm: Norm) -> nn.Sequential:
    """Return a network for pictures of 224x224: the stem reduces them to 56x56."""
    blocks, outputs = _stages(block, 64, [64, 128, 256, 512], counts, norm)
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), _norm(norm, 64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(outputs, classes))


def resnet18(classes: int = 1000, *, norm: Norm = "batch") -> nn.Sequential:
    """Return ResNet-18: 11.7 million parameters for 1,000 classes."""
    return _resnet(BasicBlock, [2, 2, 2, 2], classes, norm)


def resnet50(classes: int = 1000, *, norm: Norm = "batch") -> nn.Sequential:
    """Return ResNet-50: 25.6 million parameters for 1,000 classes."""
    return _resnet(Bottleneck, [3, 4, 6, 3], classes, norm)


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
