"""What is trained: bytes of a context to a few vectors (the wire), and those to what each frozen reader takes.

Shapes in comments: B samples, Q questions each, L bytes, M wire vectors, Z their width, W a reader's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.recipes.latent_wire.reader import EPS, Answered, Blocks, Prefix, Reader, answer


@dataclass(frozen=True)
class WireShape:
    width: int = 64  # Z
    vectors: int = 2  # M
    layers: int = 1
    heads: int = 4
    refiner: int = 0  # layers
    deep_prefix: bool = False
    gist: bool = False
    film: bool = False


class CrossAttention(nn.Module):
    """Learned queries that look at a sequence: (B, L, Z) to (B, queries, Z)."""

    def __init__(self, queries: int, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.queries = nn.Parameter(torch.randn(queries, width) * width**-0.5)
        self.norm = nn.RMSNorm(width, EPS)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, _, Z = x.shape
        q = self.q(self.queries).expand(B, -1, -1)
        k, v = self.kv(self.norm(x)).chunk(2, -1)
        q, k, v = (t.view(B, -1, self.heads, Z // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, -1, Z)
        return self.queries + self.out(y)


class Encoder(nn.Module):
    """Bytes (B, L) to the wire (B, M, Z)."""

    def __init__(self, shape: WireShape):
        super().__init__()
        Z = shape.width
        self.embed = nn.Embedding(256, Z)
        self.blocks = Blocks(Z, shape.heads, shape.layers, causal=False)
        self.pool = CrossAttention(shape.vectors, Z, shape.heads)
        self.mlp = nn.Sequential(nn.RMSNorm(Z, EPS), nn.Linear(Z, 2 * Z), nn.GELU(), nn.Linear(2 * Z, Z))

    def forward(self, context: Tensor) -> Tensor:
        latents = self.pool(self.blocks(self.embed(context)))
        return latents + self.mlp(latents)


class Adapter(nn.Module):
    """The wire as input vectors of one reader, at the size of its own embeddings.

    Without the size a frozen model sees noise: its embeddings may be a hundred times smaller or larger.
    """

    def __init__(self, width: int, reader: Reader, film: bool):
        super().__init__()
        into = reader.shape.width
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, into))
        self.skip = nn.Linear(width, into, bias=False)
        self.film = nn.Linear(width, 2 * into) if film else None
        self.out_norm = nn.LayerNorm(into, elementwise_affine=False)
        size = float(reader.embed.weight.float().pow(2).mean().sqrt())
        self.log_size = nn.Parameter(torch.tensor(size).log())
        self.first_size = size

    def forward(self, latents: Tensor) -> Tensor:
        x = self.norm(latents)
        y = self.out_norm(self.mlp(x) + self.skip(x))
        if self.film is not None:
            scale, shift = self.film(latents).chunk(2, -1)
            y = y * 2 * torch.sigmoid(scale) + shift
        return y * self.log_size.exp()

    def drift(self) -> Tensor:
        """How far the learned size has gone from the reader's own, squared."""
        return (self.log_size - torch.tensor(self.first_size).log()).square()


class DeepPrefix(nn.Module):
    """Keys and values for every layer of a reader, straight from the wire."""

    def __init__(self, width: int, reader: Reader):
        super().__init__()
        shape = reader.shape
        self.heads, self.layers = shape.heads, shape.layers
        self.make = nn.Linear(width, 2 * shape.layers * shape.width, bias=False)

    def forward(self, latents: Tensor) -> Prefix:
        B, M, _ = latents.shape
        made = self.make(latents).view(B, M, self.layers, 2, self.heads, -1).permute(2, 3, 0, 4, 1, 5)
        return [(layer[0], layer[1]) for layer in made]


class Gist(nn.Module):
    """The reader's embeddings of the text, rebuilt from the wire: (B, T, W)."""

    def __init__(self, width: int, reader: Reader, length: int, heads: int):
        super().__init__()
        self.pool = CrossAttention(length, width, heads)
        self.out = nn.Linear(width, reader.shape.width)

    def forward(self, latents: Tensor) -> Tensor:
        return self.out(self.pool(latents))


@dataclass
class Read:
    """What one reader made of a batch through the wire, and what its parts cost beside."""

    answered: Answered  # (B * Q,) rows
    gist: Tensor | None  # (B,)
    drift: Tensor


class WireModel(nn.Module):
    """Encoder and one set of trainable parts per reader, around the frozen readers themselves."""

    def __init__(self, shape: WireShape, readers: Sequence[Reader], text_lengths: Sequence[int]):
        super().__init__()
        Z = shape.width
        self.encoder = Encoder(shape)
        self.refiner = Blocks(Z, shape.heads, shape.refiner, causal=False)
        self.adapters = nn.ModuleList(Adapter(Z, reader, shape.film) for reader in readers)
        self.prefixes = nn.ModuleList(DeepPrefix(Z, reader) for reader in readers) if shape.deep_prefix else None
        pairs = zip(readers, text_lengths, strict=True)
        self.gists = nn.ModuleList(Gist(Z, *pair, shape.heads) for pair in pairs) if shape.gist else None
        self.readers = nn.ModuleList(readers)

    def forward(self, batch: dict[str, Tensor], carries: str = "context") -> list[Read]:
        """`carries`: which text goes through the wire."""
        latents = self.latents(batch[carries])
        return [self._read(number, latents, batch) for number in range(len(self.readers))]

    def latents(self, context: Tensor) -> Tensor:
        return self.refiner(self.encoder(context))

    def _read(self, number: int, latents: Tensor, batch: dict[str, Tensor]) -> Read:
        reader: Reader = self.readers[number]  # pyrefly: ignore[bad-assignment]
        adapter: Adapter = self.adapters[number]  # pyrefly: ignore[bad-assignment]
        home = reader.device
        vectors = adapter(latents).to(home)
        prefix = self.prefixes[number](latents) if self.prefixes is not None else None
        rows, asked, question, expected = questions_of(batch, number, home)
        before = torch.cat((reader.beginning(rows), vectors.to(reader.embed.weight.dtype)), 1)
        repeated = [tuple(t.to(home).repeat_interleave(asked, 0) for t in pair) for pair in prefix] if prefix else None
        answered = answer(reader, before.repeat_interleave(asked, 0), question, expected, repeated)
        gist = None
        if self.gists is not None:
            rebuilt = self.gists[number](latents).to(home)
            gist = F.mse_loss(rebuilt, reader.embed(batch[f"text_{number}"].to(home)), reduction="none").mean((1, 2))
        return Read(answered, gist, adapter.drift())


def questions_of(batch: dict[str, Tensor], number: int, device: torch.device) -> tuple[int, int, Tensor, Tensor]:
    """(samples, questions each, question ids by row, answer ids by row)."""
    question, expected = batch[f"question_{number}"].to(device), batch[f"answer_{number}"].to(device)
    return question.shape[0], question.shape[1], question.flatten(0, 1), expected.flatten(0, 1)


@torch.no_grad()
def from_text(reader: Reader, batch: dict[str, Tensor], number: int, most: int | None = None) -> Answered:
    """The same questions with the text itself before them, or its first `most` tokens (0: no context at all)."""
    rows, asked, question, expected = questions_of(batch, number, reader.device)
    text = batch[f"text_{number}"].to(reader.device)[:, :most]
    before = torch.cat((reader.beginning(rows), reader.embed(text)), 1)
    return answer(reader, before.repeat_interleave(asked, 0), question, expected)
