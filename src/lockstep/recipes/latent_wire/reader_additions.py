"""Trained parts that add to the layers of a frozen reader: LoRA, a deep prefix, cross-attention to the wire.

None of them changes the reader's weights.

Shapes in comments: B rows, T positions, M wire vectors, Z their width, W the reader's width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.recipes.latent_wire.reader import EPS, LayerAdditions, Reader, cross_attend


class LowRank(nn.Module):
    """A change of a linear layer with few parameters: x A B. B begins as zero, so at first nothing changes."""

    def __init__(self, inputs: int, outputs: int, rank: int):
        super().__init__()
        self.a = nn.Parameter(torch.randn(inputs, rank) * inputs**-0.5)
        self.b = nn.Parameter(torch.zeros(rank, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a @ self.b


class DeepPrefix(nn.Module):
    """Keys and values for every layer of a reader, straight from the wire."""

    def __init__(self, width: int, reader: Reader):
        super().__init__()
        shape = reader.shape
        self.heads = shape.heads
        self.layers = shape.layers
        self.make = nn.Linear(width, 2 * shape.layers * shape.width, bias=False)

    def forward(self, latents: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Map (B, M, Z) to keys and values (B, heads, M, channels) of each layer."""
        # One linear layer makes all of them: (layers, key or value, B, heads, M, channels).
        layers = self.make(latents).unflatten(-1, (self.layers, 2, self.heads, -1)).permute(2, 3, 0, 4, 1, 5)
        return [(layer[0], layer[1]) for layer in layers]


class GatedCrossAttention(nn.Module):
    """Cross-attention from a reader's positions to the wire. The gate begins at tanh(0): closed."""

    def __init__(self, width: int, reader: Reader):
        super().__init__()
        into = reader.shape.width
        self.heads = reader.shape.heads

        self.norm = nn.RMSNorm(into, EPS)
        self.q = nn.Linear(into, into, bias=False)
        self.kv = nn.Linear(width, 2 * into, bias=False)
        self.out = nn.Linear(into, into, bias=False)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, latents: Tensor) -> Tensor:
        """Return what is added to x (B, T, W), from the wire `latents` (B, M, Z)."""
        return torch.tanh(self.gate) * self.out(cross_attend(self.q(self.norm(x)), self.kv(latents), self.heads))


class Additions(nn.Module):
    """Everything that is added to the layers of one reader."""

    def __init__(self, width: int, reader: Reader, deep_prefix: bool, looks: Sequence[int], rank: int):
        super().__init__()
        self.layers = reader.shape.layers

        # The order of creation fixes the random numbers that a seed gives to each part.
        self.prefix = DeepPrefix(width, reader) if deep_prefix else None
        self.looking = list(looks)  # the layers with cross-attention
        self.looks = nn.ModuleList(GatedCrossAttention(width, reader) for _ in looks)

        # LoRA changes the two linear layers of each attention.
        into = reader.shape.width
        self.lora = nn.ModuleList(
            nn.ModuleDict({"qkv": LowRank(into, 3 * into, rank), "out": LowRank(into, into, rank)})
            for _ in range(self.layers if rank else 0)
        )

    def forward(self, latents: Tensor, asked: int, device: torch.device) -> list[LayerAdditions] | None:
        """Return the additions for each layer of a reader on `device`.

        Every row of `latents` (B, M, Z) serves `asked` questions.
        """
        # Without additions a reader is called as it was trained.
        if self.prefix is None and not self.looks and not self.lora:
            return None

        home = latents.device
        pairs = self.prefix(latents) if self.prefix is not None else []
        # The prefix is made once for each wire and repeated for its questions afterwards.
        repeated = latents.repeat_interleave(asked, 0) if self.looks else latents

        # For each layer the fields of its LayerAdditions.
        added: list[dict[str, Any]] = [{} for _ in range(self.layers)]
        for layer, pair in enumerate(pairs):
            added[layer]["prefix"] = tuple(t.to(device).repeat_interleave(asked, 0) for t in pair)

        for layer, low_rank in enumerate(self.lora):
            for name, change in low_rank.items():  # pyrefly: ignore[not-callable]
                added[layer][name] = _across_devices(change, home, device)

        for layer, look in zip(self.looking, self.looks, strict=True):
            added[layer] |= {"look": _across_devices(look, home, device), "wire": repeated}

        return [LayerAdditions(**parts) for parts in added]


def _across_devices(
    module: Callable[..., Tensor], home: torch.device, reader_device: torch.device
) -> Callable[..., Tensor]:
    """Return a function that computes `module` on its own device, `home`, for a reader on another device.

    On one device it is the module itself: a new function in every step could not be compiled.
    """
    if home == reader_device:
        return module

    return lambda x, *wire: module(x.to(home), *wire).to(reader_device)
