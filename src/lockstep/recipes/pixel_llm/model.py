"""An image encoder, and a decoder that reads its memory through cross-attention.

Shapes in comments: B images of S x S pixels, M memory tokens, T words, W width, H heads, D = W / H, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    image: int
    stem: str  # conv or patch
    patch: int  # pixels; only of the stem `patch`
    width: int
    heads: int
    vision_layers: int
    text_layers: int
    vocabulary: int
    words: int  # positions of the decoder
    spatial_pool: bool = False
    place_std: float = 0.02  # of the vectors that tell the encoder where a token lies, at the start

    @property
    def tokens(self) -> int:
        return (self.image // (8 if self.stem == "conv" else self.patch)) ** 2


@dataclass
class LayerCache:
    """What one decoder layer has computed so far: its own keys and values, and those of the memory; (B, H, ., D)."""

    own: tuple[Tensor, Tensor] | None = None
    memory: tuple[Tensor, Tensor] | None = None

    def pick(self, rows: Tensor) -> None:
        self.own = None if self.own is None else (self.own[0][rows], self.own[1][rows])
        self.memory = None if self.memory is None else (self.memory[0][rows], self.memory[1][rows])


@dataclass
class Cache:
    """Of a caption that is being written: one more word costs one position, and the image is encoded once."""

    layers: list[LayerCache] = field(default_factory=list)
    length: int = 0  # words read so far

    def pick(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order: what a beam search does after every word."""
        for layer in self.layers:
            layer.pick(rows)


class Attention(nn.Module):
    """Multi-head attention from `x` to itself or to a memory."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def keys_and_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        B, N, W = source.shape
        both = self.key_value(source).view(B, N, 2, self.heads, W // self.heads).permute(2, 0, 3, 1, 4)
        return both[0], both[1]  # (B, H, N, D)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, causal: bool = False) -> Tensor:
        B, T, W = x.shape
        query = self.query(x).view(B, T, self.heads, W // self.heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(query, keys, values, is_causal=causal)  # (B, H, T, D)
        return self.out(y.transpose(1, 2).reshape(B, T, W))


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.mlp_norm, self.mlp = nn.LayerNorm(width), mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, *self.attention.keys_and_values(normed))
        return x + self.mlp(self.mlp_norm(x))


class DecoderLayer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.self_norm, self.self_attention = nn.LayerNorm(width), Attention(width, heads)
        self.cross_norm, self.cross_attention = nn.LayerNorm(width), Attention(width, heads)
        self.mlp_norm, self.mlp = nn.LayerNorm(width), mlp(width)

    def forward(self, x: Tensor, memory: Tensor | None, cache: LayerCache | None = None) -> Tensor:
        """`x` (B, T, W). With a cache T is 1, and `memory` may be None once its keys and values are kept."""
        normed = self.self_norm(x)
        own = self.self_attention.keys_and_values(normed)
        seen = None if cache is None else cache.memory
        if cache is not None:
            if cache.own is not None:
                own = torch.cat((cache.own[0], own[0]), dim=2), torch.cat((cache.own[1], own[1]), dim=2)
            cache.own = own
        x = x + self.self_attention(normed, *own, causal=cache is None)
        if seen is None:
            assert memory is not None
            seen = self.cross_attention.keys_and_values(memory)
            if cache is not None:
                cache.memory = seen
        x = x + self.cross_attention(self.cross_norm(x), *seen)
        return x + self.mlp(self.mlp_norm(x))


class SpatialPool(nn.Module):
    """One more look of the memory at itself."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention, self.norm = Attention(width, heads), nn.LayerNorm(width)

    def forward(self, memory: Tensor) -> Tensor:
        return self.norm(memory + self.attention(memory, *self.attention.keys_and_values(memory)))


class Encoder(nn.Module):
    """Images (B, 3, S, S) in bytes to memory (B, M, W)."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        width, self.place_std = sizes.width, sizes.place_std
        self.stem = _conv_stem(width) if sizes.stem == "conv" else nn.Conv2d(3, width, sizes.patch, sizes.patch)
        self.positions = nn.Parameter(torch.empty(sizes.tokens, width))
        self.layers = nn.ModuleList(EncoderLayer(width, sizes.heads) for _ in range(sizes.vision_layers))
        self.norm = nn.LayerNorm(width)
        self.pool = SpatialPool(width, sizes.heads) if sizes.spatial_pool else nn.Identity()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.positions, std=self.place_std)

    def forward(self, images: Tensor) -> Tensor:
        # Scenes are dark: the mean of a pixel is about 0.25. The stem learns about twice as fast for it.
        x = self.stem((images.float() / 255 - 0.25) / 0.25)  # (B, W, S', S')
        x = x.flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.pool(self.norm(x))


class Captioner(nn.Module):
    """Images and words so far (B, T) to logits of the next words (B, T, V)."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes = sizes
        self.encoder = Encoder(sizes)
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Parameter(torch.empty(sizes.words, sizes.width))
        self.layers = nn.ModuleList(DecoderLayer(sizes.width, sizes.heads) for _ in range(sizes.text_layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary)
        self.reset_parameters()
        self.encoder.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """With a cache, `ids` is the one next word (B, 1), and `images` counts only the first time."""
        start = 0 if cache is None else cache.length
        if cache is not None and not cache.layers:
            cache.layers = [LayerCache() for _ in self.layers]
        memory = self.encoder(images) if start == 0 else None
        x = self.embed(ids) + self.positions[start : start + ids.shape[1]]
        for number, layer in enumerate(self.layers):
            x = layer(x, memory, None if cache is None else cache.layers[number])
        if cache is not None:
            cache.length += ids.shape[1]
        return self.head(self.norm(x))


def _conv_stem(width: int) -> nn.Sequential:
    """Three convolutions of stride 2: 8 x 8 pixels a token."""
    parts: list[nn.Module] = []
    for inside, outside, kernel in ((3, 32, 5), (32, 64, 3), (64, width, 3)):
        parts += [nn.Conv2d(inside, outside, kernel, 2, kernel // 2), nn.GroupNorm(8, outside), nn.GELU()]
    return nn.Sequential(*parts)
