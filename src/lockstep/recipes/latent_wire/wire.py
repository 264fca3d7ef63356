"""What is trained: bytes of a context to a few vectors (the wire), and those to what each frozen reader takes.

Shapes in comments: B samples, Q questions each, L bytes, M wire vectors, Z their width, W a reader's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.recipes.latent_wire.aids import Aids
from lockstep.recipes.latent_wire.reader import EPS, Answered, Blocks, Reader, answer, decode

SLOPE = 8.0  # of the first head that sees best what is near its centre


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
    colour: bool = False
    private: int = 0  # vectors for each reader alone, beside the M
    looks: tuple[int, ...] = ()  # layers of the readers that look at the wire
    rank: int = 0  # of a change to the readers' attention
    near: int = 0  # positions that each layer of the encoder mixes, as in a reader
    spread: bool = False  # each vector has a part of the text that it sees best

    @property
    def read(self) -> int:
        """Vectors that one reader gets."""
        return self.vectors + self.private

    def sent(self, readers: int) -> int:
        return self.vectors + self.private * readers

    def centres(self, readers: int) -> list[float] | None:
        """Where in the text, from 0 to 1, each vector looks first: every group of them goes from end to end."""
        groups = (self.vectors, *[self.private] * readers)
        return [(i + 0.5) / count for count in groups for i in range(count)] if self.spread else None


class CrossAttention(nn.Module):
    """Learned queries that look at a sequence: (B, L, Z) to (B, queries, Z). One that has a centre sees less of what is
    far from it: most so in the first head, half as much so in each that follows, and in the last not at all."""

    def __init__(self, queries: int, width: int, heads: int, centres: list[float] | None = None):
        super().__init__()
        self.heads = heads
        self.register_buffer("centres", torch.tensor(centres) if centres else None, persistent=False)
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
        mask = far(self.centres, self.heads, x.shape[1]).to(q.dtype) if self.centres is not None else None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(B, -1, Z)
        return self.queries + self.out(y)


def far(centres: Tensor, heads: int, length: int) -> Tensor:
    """What a query's centre adds to its scores: (1, heads, queries, length). Distances are in shares of the
    sequence, of which each query has one."""
    place = (torch.arange(length, device=centres.device) + 0.5) / length
    distance = (place - centres[:, None]).abs() * len(centres)
    head = torch.arange(heads, device=centres.device)
    slope = torch.where(head < heads - 1, SLOPE * 0.5**head, 0.0)
    return -(slope[:, None, None] * distance)[None]


class Encoder(nn.Module):
    """Bytes (B, L) to the wire (B, M, Z)."""

    def __init__(self, shape: WireShape, readers: int):
        super().__init__()
        Z = shape.width
        self.embed = nn.Embedding(256, Z)
        self.blocks = Blocks(Z, shape.heads, shape.layers, causal=False, near=shape.near)
        self.pool = CrossAttention(shape.sent(readers), Z, shape.heads, shape.centres(readers))
        self.mlp = nn.Sequential(nn.RMSNorm(Z, EPS), nn.Linear(Z, 2 * Z), nn.GELU(), nn.Linear(2 * Z, Z))

    def forward(self, context: Tensor) -> Tensor:
        latents = self.pool(self.blocks(self.embed(context)))
        return latents + self.mlp(latents)


class Adapter(nn.Module):
    """The wire as input vectors of one reader, at the size of its own embeddings.

    Without the size a frozen model sees noise: its embeddings may be a hundred times smaller or larger.
    """

    def __init__(self, width: int, reader: Reader, film: bool, colour: bool):
        super().__init__()
        into = reader.shape.width
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, into))
        self.skip = nn.Linear(width, into, bias=False)
        self.film = nn.Linear(width, 2 * into) if film else None
        self.out_norm = nn.LayerNorm(into, elementwise_affine=False)
        weight = reader.embed.weight.detach().float()
        size = float(weight.pow(2).mean().sqrt())
        self.log_size = nn.Parameter(torch.tensor(size).log())
        self.first_size = size
        # Per channel what the reader's own embeddings have, in units of their size; from the reader, so never saved.
        std, mean = torch.std_mean(weight, 0) if colour else (None, None)
        self.register_buffer("std", std / size if std is not None else None, persistent=False)
        self.register_buffer("mean", mean / size if mean is not None else None, persistent=False)

    def forward(self, latents: Tensor) -> Tensor:
        x = self.norm(latents)
        y = self.out_norm(self.mlp(x) + self.skip(x))
        if self.film is not None:
            scale, shift = self.film(latents).chunk(2, -1)
            y = y * 2 * torch.sigmoid(scale) + shift
        if self.std is not None:
            y = y * self.std + self.mean
        return y * self.log_size.exp()

    def drift(self) -> Tensor:
        """How far the learned size has gone from the reader's own, squared."""
        return (self.log_size - torch.tensor(self.first_size).log()).square()


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
    gist: Tensor | None  # one for each wire
    drift: Tensor
    seen: Tensor  # (rows, M, Z) what of the wire was for it
    written: Tensor | None = None  # (B * Q, tokens) the answers, written freely


class WireModel(nn.Module):
    """Encoder and one set of trainable parts per reader, around the frozen readers themselves."""

    def __init__(self, shape: WireShape, readers: Sequence[Reader], text_lengths: Sequence[int]):
        super().__init__()
        Z = shape.width
        self.shared, self.private = shape.vectors, shape.private
        self.encoder = Encoder(shape, len(readers))
        self.refiner = Blocks(Z, shape.heads, shape.refiner, causal=False)
        self.adapters = nn.ModuleList(Adapter(Z, reader, shape.film, shape.colour) for reader in readers)
        pairs = zip(readers, text_lengths, strict=True)
        self.gists = nn.ModuleList(Gist(Z, *pair, shape.heads) for pair in pairs) if shape.gist else None
        self.aids = nn.ModuleList(Aids(Z, one, shape.deep_prefix, shape.looks, shape.rank) for one in readers)
        self.readers = nn.ModuleList(readers)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Its blocks, one by one: those of a reader share a graph, and so do the encoder's. The whole model would be a
        long one. Shapes are fixed, or the second reader would be compiled for any length."""
        here: list[Reader] = [one for one in self.readers if one.home is None]  # pyrefly: ignore[bad-assignment]
        for block in (*self.encoder.blocks, *self.refiner, *(block for reader in here for block in reader.blocks)):
            block.compile(*args, dynamic=False, **kwargs)

    def forward(self, batch: dict[str, Tensor], carries: str = "context", write: bool = False) -> list[Read]:
        """`carries`: which text goes through the wire. `write`: let the readers write their answers, too."""
        latents = self.latents(batch[carries])
        return [self._read(number, latents, batch, write) for number in range(len(self.readers))]

    def latents(self, carried: Tensor) -> Tensor:
        """Bytes (B, L), or (B, Q, L) if every question has a wire of its own, to (rows, vectors sent, Z)."""
        return self.refiner(self.encoder(carried.flatten(0, -2)))

    def seen_by(self, number: int, latents: Tensor) -> Tensor:
        """The shared vectors, and those that are for this reader alone."""
        first = self.shared + number * self.private
        return torch.cat((latents[:, : self.shared], latents[:, first : first + self.private]), 1)

    def _read(self, number: int, latents: Tensor, batch: dict[str, Tensor], write: bool) -> Read:
        reader: Reader = self.readers[number]  # pyrefly: ignore[bad-assignment]
        adapter: Adapter = self.adapters[number]  # pyrefly: ignore[bad-assignment]
        seen, home = self.seen_by(number, latents), reader.device
        question, expected = ids_of(batch, number, home, "after")
        before = put_before(reader, adapter(seen).to(home), len(question))
        aids = self.aids[number](seen, len(question) // len(seen), home)
        answered = answer(reader, before, question, expected, aids)
        written = decode(reader, before, question, expected.shape[1], aids) if write else None
        gist = self._gist(number, seen, batch[f"text_{number}"]) if self.gists is not None else None
        return Read(answered, gist, adapter.drift(), seen, written)

    def _gist(self, number: int, seen: Tensor, text: Tensor) -> Tensor:
        assert self.gists is not None
        reader: Reader = self.readers[number]  # pyrefly: ignore[bad-assignment]
        rebuilt = self.gists[number](seen).to(reader.device)
        embedded = reader.embed(text.to(reader.device)).repeat_interleave(len(rebuilt) // len(text), 0)
        return F.mse_loss(rebuilt, embedded, reduction="none").mean((1, 2))


def put_before(reader: Reader, vectors: Tensor, rows: int) -> Tensor:
    """The beginning and `vectors` (B, T, W), before each of `rows` questions, as many for each row of `vectors`."""
    before = torch.cat((reader.beginning(len(vectors)), vectors.to(reader.embed.weight.dtype)), 1)
    return before.repeat_interleave(rows // len(vectors), 0)


def ids_of(batch: dict[str, Tensor], number: int, device: torch.device, asked: str) -> tuple[Tensor, Tensor]:
    """Ids by row, one row for each question: what is asked (`question`, or what of it comes `after` the wire), and the
    answer."""
    question, expected = batch[f"{asked}_{number}"].to(device), batch[f"answer_{number}"].to(device)
    return question.flatten(0, 1), expected.flatten(0, 1)


@torch.no_grad()
def from_text(reader: Reader, batch: dict[str, Tensor], number: int, most: int | None = None) -> Answered:
    """The same questions with the text itself before them, or its first `most` tokens (0: no context at all)."""
    question, expected = ids_of(batch, number, reader.device, "question")
    text = batch[f"text_{number}"].to(reader.device)[:, :most]
    ids = torch.cat((text.new_zeros(len(text), 1), text), 1)
    return answer(reader, reader.embed(ids.repeat_interleave(len(question) // len(ids), 0)), question, expected)


@torch.no_grad()
def from_replay(reader: Reader, batch: dict[str, Tensor], number: int) -> Answered:
    """The reader's embeddings of the text, put where a wire's vectors go: shows whether that way in loses anything."""
    question, expected = ids_of(batch, number, reader.device, "question")
    vectors = reader.embed(batch[f"text_{number}"].to(reader.device))
    return answer(reader, put_before(reader, vectors, len(question)), question, expected)
