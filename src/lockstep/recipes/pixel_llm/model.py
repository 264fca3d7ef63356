"""An image encoder, and a decoder that reads the encoder's memory through cross-attention.

Shapes in comments: B images of S x S pixels, M memory tokens, T words, W width, H heads, D = W / H, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lockstep.recipes.layers import merge_heads, split_heads

# Keys and values, (B, H, N, D) each; empty where nothing was computed yet.
KeysAndValues = tuple[Tensor, ...]


@dataclass(frozen=True)
class CaptionerOptions:
    # Pixels on each side of a picture.
    image: int = 32

    # `conv`: three convolutions with 8 x 8 pixels a token; `patch`: one linear map of each patch.
    stem: str = "conv"

    # Pixels on each side of a patch, for the stem `patch`.
    patch: int = 8

    # Width of encoder and decoder.
    width: int = 96

    # Attention heads of both.
    heads: int = 4

    # Layers of the encoder.
    vision_layers: int = 2

    # Layers of the decoder.
    text_layers: int = 2

    # Rows of the embedding, if it should have more than the captions have words.
    vocabulary: int | None = None

    # Whether the memory attends to itself once more before the decoder reads it.
    spatial_pool: bool = False

    # Initial standard deviation of the vectors that tell the encoder where in the picture a token lies.
    place_std: float = 0.02

    @property
    def pixels_per_token(self) -> int:
        return 8 if self.stem == "conv" else self.patch


@dataclass(frozen=True, kw_only=True)
class Sizes(CaptionerOptions):
    """The options of a model, and what its captions ask of it."""

    vocabulary: int

    # Positions of the decoder.
    words: int


@dataclass
class LayerCache:
    """The cache of one decoder layer: its own keys and values, and those of the memory."""

    own: KeysAndValues = ()
    memory: KeysAndValues = ()

    def append(self, new: KeysAndValues) -> KeysAndValues:
        """Append the keys and values of a word to the layer's own. Return all of them."""
        if self.own:
            new = tuple(torch.cat(pair, dim=2) for pair in zip(self.own, new, strict=True))

        self.own = new
        return new


@dataclass
class Cache:
    """The cache of a caption that is being written: a word costs one position, and the image is encoded once."""

    # By number of the decoder layer.
    layers: dict[int, LayerCache] = field(default_factory=lambda: defaultdict(LayerCache))

    # Words read so far.
    length: int = 0

    def pick(self, rows: Tensor) -> None:
        """Keep these rows of the batch in this order, as a beam search does after every word."""
        for layer in self.layers.values():
            layer.own = tuple(part[rows] for part in layer.own)
            layer.memory = tuple(part[rows] for part in layer.memory)


class Attention(nn.Module):
    """Multi-head attention from `x` to itself or to a memory."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def keys_and_values(self, source: Tensor) -> KeysAndValues:
        """Return keys and values (B, H, N, D) of `source` (B, N, W)."""
        both = self.key_value(source).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return both[0], both[1]

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, causal: bool = False) -> Tensor:
        """Attend from `x` (B, T, W) to keys and values (B, H, N, D)."""
        query = split_heads(self.query(x), self.heads)
        return self.out(merge_heads(nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=causal)))


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)

        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        # Normed once: queries, keys and values come from the same tensor.
        normed = self.attention_norm(x)
        x = x + self.attention(normed, *self.attention.keys_and_values(normed))
        return x + self.mlp(self.mlp_norm(x))


class DecoderLayer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.self_norm = nn.LayerNorm(width)
        self.self_attention = Attention(width, heads)

        self.cross_norm = nn.LayerNorm(width)
        self.cross_attention = Attention(width, heads)

        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = mlp(width)

    def forward(self, x: Tensor, memory: Tensor | None, cache: LayerCache | None = None) -> Tensor:
        """Decode `x` (B, T, W) with the memory (B, M, W).

        With a cache T is 1, and `memory` may be None once the cache holds its keys and values.
        """
        # With a cache, the one new word may look at every word before it: nothing has to be masked.
        causal = cache is None
        cache = cache or LayerCache()
        normed = self.self_norm(x)
        own = cache.append(self.self_attention.keys_and_values(normed))
        x = x + self.self_attention(normed, *own, causal=causal)

        # The keys and values of the memory are the same for every word.
        if not cache.memory:
            assert memory is not None
            cache.memory = self.cross_attention.keys_and_values(memory)

        x = x + self.cross_attention(self.cross_norm(x), *cache.memory)

        return x + self.mlp(self.mlp_norm(x))


class SpatialPool(nn.Module):
    """Attention of the memory (B, M, W) to itself, normed."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm = nn.LayerNorm(width)

    def forward(self, memory: Tensor) -> Tensor:
        return self.norm(memory + self.attention(memory, *self.attention.keys_and_values(memory)))


class ImageEncoder(nn.Module):
    """Images (B, 3, S, S) in bytes to memory (B, M, W)."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        width = sizes.width
        self.place_std = sizes.place_std
        if sizes.stem == "conv":
            self.stem: nn.Module = _conv_stem(width)
        else:
            self.stem = nn.Conv2d(3, width, sizes.patch, sizes.patch)

        tokens = (sizes.image // sizes.pixels_per_token) ** 2
        self.positions = nn.Parameter(torch.empty(tokens, width))

        self.layers = nn.ModuleList(EncoderLayer(width, sizes.heads) for _ in range(sizes.vision_layers))
        self.norm = nn.LayerNorm(width)
        self.pool = SpatialPool(width, sizes.heads) if sizes.spatial_pool else nn.Identity()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.positions, std=self.place_std)

    def forward(self, images: Tensor) -> Tensor:
        # Scenes are dark: the mean of a pixel is about 0.25. Centred like this the stem learns about twice as fast.
        x = self.stem((images.float() / 255 - 0.25) / 0.25)  # (B, W, rows, columns)
        x = x.flatten(2).transpose(1, 2) + self.positions  # (B, M, W)

        for layer in self.layers:
            x = layer(x)

        return self.pool(self.norm(x))


class Captioner(nn.Module):
    """Images (B, 3, S, S) and the words so far (B, T) to logits of the next words (B, T, V)."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        width = sizes.width
        self.encoder = ImageEncoder(sizes)
        self.embed = nn.Embedding(sizes.vocabulary, width)
        self.positions = nn.Parameter(torch.empty(sizes.words, width))
        self.layers = nn.ModuleList(DecoderLayer(width, sizes.heads) for _ in range(sizes.text_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, sizes.vocabulary)

        # The order decides which random numbers each of the two draws.
        self.reset_parameters()
        self.encoder.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the logits after each of the words `ids`.

        With a cache, `ids` is the one next word (B, 1), and `images` is read the first time only.
        """
        start = 0 if cache is None else cache.length

        # The picture is encoded for the first word; from then on every layer has its keys and values.
        memory = self.encoder(images) if start == 0 else None

        x = self.embed(ids) + self.positions[start : start + ids.shape[1]]  # (B, T, W)
        for number, layer in enumerate(self.layers):
            x = layer(x, memory, None if cache is None else cache.layers[number])

        if cache is not None:
            cache.length += ids.shape[1]

        return self.head(self.norm(x))


def _conv_stem(width: int) -> nn.Sequential:
    """Return three convolutions of stride 2, so that a token is 8 x 8 pixels."""
    layers: list[nn.Module] = []
    for inputs, outputs, kernel in ((3, 32, 5), (32, 64, 3), (64, width, 3)):
        layers += [
            nn.Conv2d(inputs, outputs, kernel, stride=2, padding=kernel // 2),
            nn.GroupNorm(8, outputs),
            nn.GELU(),
        ]

    return nn.Sequential(*layers)
