"""Trained parts that reach into the layers of a frozen reader. None of them changes its weights.

Shapes in comments: B rows, T positions, M wire vectors, Z their width, W the reader's width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.recipes.latent_wire.reader import EPS, Aid, Reader


class LowRank(nn.Module):
    """A change of a linear layer that has few numbers: x A B. B begins as zero, so at first nothing changes."""

    def __init__(self, inputs: int, outputs: int, rank: int):
        super().__init__()
        self.a = nn.Parameter(torch.randn(inputs, rank) * inputs**-0.5)
        self.b = nn.Parameter(torch.zeros(rank, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a @ self.b


class LowRankLayer(nn.Module):
    """The two linear layers of one attention (LoRA)."""

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.qkv, self.out = LowRank(width, 3 * width, rank), LowRank(width, width, rank)


class DeepPrefix(nn.Module):
    """Keys and values for every layer of a reader, straight from the wire."""

    def __init__(self, width: int, reader: Reader):
        super().__init__()
        shape = reader.shape
        self.heads, self.layers = shape.heads, shape.layers
        self.make = nn.Linear(width, 2 * shape.layers * shape.width, bias=False)

    def forward(self, latents: Tensor) -> list[tuple[Tensor, Tensor]]:
        B, M, _ = latents.shape
        made = self.make(latents).view(B, M, self.layers, 2, self.heads, -1).permute(2, 3, 0, 4, 1, 5)
        return [(layer[0], layer[1]) for layer in made]


class Look(nn.Module):
    """Gated cross-attention from a reader's positions to the wire. The gate begins at tanh(0): closed."""

    def __init__(self, width: int, reader: Reader):
        super().__init__()
        into, self.heads = reader.shape.width, reader.shape.heads
        self.norm = nn.RMSNorm(into, EPS)
        self.q = nn.Linear(into, into, bias=False)
        self.kv = nn.Linear(width, 2 * into, bias=False)
        self.out = nn.Linear(into, into, bias=False)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, latents: Tensor) -> Tensor:
        """x (B, T, W), latents (B, M, Z) to what is added to x."""
        B, T, W = x.shape
        k, v = self.kv(latents).chunk(2, -1)
        q, k, v = (t.view(B, -1, self.heads, W // self.heads).transpose(1, 2) for t in (self.q(self.norm(x)), k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, W)
        return torch.tanh(self.gate) * self.out(y)


class Aids(nn.Module):
    """All that is added to the layers of one reader."""

    def __init__(self, width: int, reader: Reader, deep_prefix: bool, looks: Sequence[int], rank: int):
        super().__init__()
        self.layers = reader.shape.layers
        self.prefix = DeepPrefix(width, reader) if deep_prefix else None
        self.looking = list(looks)  # which layers
        self.looks = nn.ModuleList(Look(width, reader) for _ in looks)
        lora = range(self.layers) if rank else ()
        self.lora = nn.ModuleList(LowRankLayer(reader.shape.width, rank) for _ in lora)

    def forward(self, latents: Tensor, asked: int, home: torch.device) -> list[Aid] | None:
        """One for each layer; every row of `latents` serves `asked` questions of a reader that lives at `home`."""
        if self.prefix is None and not self.looks and not self.lora:
            return None
        pairs = self.prefix(latents) if self.prefix is not None else None
        repeated = latents.repeat_interleave(asked, 0) if self.looks else latents
        return [self._aid(layer, pairs, repeated, asked, home) for layer in range(self.layers)]

    def _aid(
        self,
        layer: int,
        pairs: list[tuple[Tensor, Tensor]] | None,
        latents: Tensor,
        asked: int,
        home: torch.device,
    ) -> Aid:
        prefix = tuple(t.to(home).repeat_interleave(asked, 0) for t in pairs[layer]) if pairs else None
        low = self.lora[layer] if self.lora else None
        look = self.looks[self.looking.index(layer)] if layer in self.looking else None
        here = latents.device
        return Aid(
            prefix,  # pyrefly: ignore[bad-argument-type]
            _from(low.qkv, here, home) if low is not None else None,  # pyrefly: ignore[bad-argument-type]
            _from(low.out, here, home) if low is not None else None,  # pyrefly: ignore[bad-argument-type]
            _from(look, here, home) if look is not None else None,
            latents if look is not None else None,
        )


def _from(change: Callable[..., Tensor], here: torch.device, home: torch.device) -> Callable[..., Tensor]:
    """`change` is computed `here`, where its weights are, which may be another device than the reader's `home`. A new
    function in every step could not be compiled."""
    return change if here == home else lambda x, *wire: change(x.to(here), *wire).to(home)
