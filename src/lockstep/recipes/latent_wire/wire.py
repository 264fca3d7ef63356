"""The trained model: the bytes of a context become a few vectors (the wire), and those become inputs of frozen readers.

Shapes in comments: B samples, Q questions each, L bytes, M wire vectors, Z their width, W a reader's width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.recipes.latent_wire.reader import EPS, Answered, Blocks, Reader, answer, cross_attend, decode
from lockstep.recipes.latent_wire.reader_additions import Additions

SLOPE = 8.0  # how much the first head's attention falls with the distance from a query's centre


@dataclass(frozen=True, kw_only=True)
class WireShape:
    """The wire, and what it adds to the readers. The fields are options of the task."""

    # M vectors of width Z for all readers, and further vectors for each reader alone.
    vectors: int = 2
    private: int = 0
    width: int = 64

    # Layers and heads of the encoder.
    layers: int = 1
    heads: int = 4

    # Positions that a layer of the encoder mixes before it attends, as in a reader.
    near: int = 0

    # Each vector has a part of the text that it sees best.
    spread: bool = False

    # Layers over the wire.
    refiner: int = 0

    # Keys and values for every layer of a reader.
    deep_prefix: bool = False

    # The layers of the readers that attend to the wire.
    latent_adapter: list[int] | None = None

    # The rank of a change to the readers' attention.
    lora: int = 0

    # Rebuild the reader's embeddings of the text from the wire, as a further loss.
    gist: bool = False

    # Scale and shift the adapter's output by the wire.
    film: bool = False

    # Give the adapter's output the mean and deviation of the reader's embeddings.
    colour: bool = False

    @property
    def read(self) -> int:
        """Vectors that one reader gets."""
        return self.vectors + self.private

    def sent(self, readers: int) -> int:
        """Vectors of the whole wire."""
        return self.vectors + self.private * readers

    def centres(self, readers: int) -> list[float] | None:
        """Return where in the text, from 0 to 1, each vector looks first. Every group of vectors covers all of it."""
        if not self.spread:
            return None

        groups = (self.vectors, *[self.private] * readers)
        return [(i + 0.5) / count for count in groups for i in range(count)]


class CrossAttention(nn.Module):
    """Learned queries that attend to a sequence: (B, L, Z) to (B, queries, Z).

    A query with a centre sees less of what is far from it: most so in the first head, half as much in each following
    one, and not at all in the last.
    """

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
        # The queries are the same for every row.
        q = self.q(self.queries).expand(len(x), -1, -1)
        kv = self.kv(self.norm(x))

        # Without centres every query sees the whole text equally.
        bias = None if self.centres is None else distance_bias(self.centres, self.heads, x.shape[1]).to(q.dtype)
        return self.queries + self.out(cross_attend(q, kv, self.heads, bias))


def distance_bias(centres: Tensor, heads: int, length: int) -> Tensor:
    """Return what the centres (queries,) add to attention scores: (1, heads, queries, length).

    The unit of distance is one query's share of the sequence.
    """
    position = (torch.arange(length, device=centres.device) + 0.5) / length
    distance = (position - centres[:, None]).abs() * len(centres)

    # The last head has no slope: it sees the whole text equally.
    head = torch.arange(heads, device=centres.device)
    slope = torch.where(head < heads - 1, SLOPE * 0.5**head, 0.0)
    return -(slope[:, None, None] * distance)[None]


class WireEncoder(nn.Module):
    """The encoder from bytes (B, L) to the wire (B, M, Z)."""

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
    """Turns the wire (B, M, Z) into input vectors (B, M, W) of one reader, at the scale of its own embeddings.

    At another scale a frozen model sees noise: its embeddings may be a hundred times smaller or larger.
    """

    def __init__(self, width: int, reader: Reader, film: bool, colour: bool):
        super().__init__()
        into = reader.shape.width

        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, into))
        self.skip = nn.Linear(width, into, bias=False)
        self.film = nn.Linear(width, 2 * into) if film else None
        self.out_norm = nn.LayerNorm(into, elementwise_affine=False)

        # Learned as a logarithm, so that it stays positive.
        weight = reader.embed.weight.detach().float()
        size = float(weight.pow(2).mean().sqrt())
        self.log_size = nn.Parameter(torch.tensor(size).log())
        self.first_size = size

        # The deviation and mean of each channel of the reader's embeddings, relative to their size. They follow from
        # the reader, so they are not saved.
        std, mean = torch.std_mean(weight, 0) if colour else (None, None)
        self.register_buffer("std", std / size if std is not None else None, persistent=False)
        self.register_buffer("mean", mean / size if mean is not None else None, persistent=False)

    def forward(self, latents: Tensor) -> Tensor:
        x = self.norm(latents)
        y = self.out_norm(self.mlp(x) + self.skip(x))

        if self.film is not None:
            scale, shift = self.film(latents).chunk(2, -1)
            # A scale between 0 and 2, which is 1 for an output of 0.
            y = y * 2 * torch.sigmoid(scale) + shift

        if self.std is not None:
            y = y * self.std + self.mean

        return y * self.log_size.exp()

    def drift(self) -> Tensor:
        """Return the squared distance of the learned log size from the reader's own."""
        return (self.log_size - torch.tensor(self.first_size).log()).square()


@dataclass
class Read:
    """The result of one reader for a batch through the wire, and the extra losses of its parts."""

    answered: Answered  # (B * Q,) rows
    gist: Tensor | None  # the error of the rebuilt text, one for each wire
    drift: Tensor  # the drift of the adapter's size
    seen: Tensor  # (rows, M, Z), the vectors that this reader got
    written: Tensor | None = None  # (B * Q, tokens), the answers by greedy decoding


class WireModel(nn.Module):
    """The encoder and one set of trained parts per reader, around the frozen readers themselves."""

    def __init__(self, shape: WireShape, readers: Sequence[Reader], text_lengths: Sequence[int]):
        super().__init__()
        Z = shape.width
        self.shared = shape.vectors
        self.private = shape.private

        # The order of creation fixes the random numbers that a seed gives to each part.
        self.encoder = WireEncoder(shape, len(readers))
        self.refiner = Blocks(Z, shape.heads, shape.refiner, causal=False)
        self.adapters = nn.ModuleList(Adapter(Z, reader, shape.film, shape.colour) for reader in readers)

        # From the wire to a reader's embeddings of the text (B, T, W).
        self.gists = nn.ModuleList()
        for reader, length in zip(readers, text_lengths, strict=True):
            if shape.gist:
                pool: nn.Module = CrossAttention(length, Z, shape.heads)
                self.gists.append(nn.Sequential(OrderedDict(pool=pool, out=nn.Linear(Z, reader.shape.width))))

        # The name is part of the parameter names in checkpoints.
        self.aids = nn.ModuleList(
            Additions(Z, reader, shape.deep_prefix, shape.latent_adapter or (), shape.lora) for reader in readers
        )
        self.readers = nn.ModuleList(readers)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the blocks, one by one: the blocks of a reader share a graph, and so do the encoder's.

        A graph of the whole model would be long. Shapes are static: otherwise the second reader would be compiled for
        any length.
        """
        # Readers on another device are left out.
        blocks = [*self.encoder.blocks, *self.refiner]
        for reader in self.readers:
            if reader.fixed_device is None:
                blocks += reader.blocks  # pyrefly: ignore[unsupported-operation]

        for block in blocks:
            block.compile(*args, dynamic=False, **kwargs)

    def forward(self, batch: dict[str, Tensor], carries: str = "context", write: bool = False) -> list[Read]:
        """Return what each reader makes of a batch.

        carries  the text that goes through the wire
        write    also let the readers write their answers
        """
        latents = self.latents(batch[carries])
        return [self._read(number, latents, batch, write) for number in range(len(self.readers))]

    def latents(self, carried: Tensor) -> Tensor:
        """Map bytes (B, L), or (B, Q, L) if every question has its own wire, to (rows, all vectors, Z)."""
        return self.refiner(self.encoder(carried.flatten(0, -2)))

    def seen_by(self, number: int, latents: Tensor) -> Tensor:
        """Return the shared vectors and those that are for this reader alone."""
        first = self.shared + number * self.private
        return torch.cat((latents[:, : self.shared], latents[:, first : first + self.private]), 1)

    def _read(self, number: int, latents: Tensor, batch: dict[str, Tensor], write: bool) -> Read:
        reader: Reader = self.readers[number]  # pyrefly: ignore[bad-assignment]
        adapter: Adapter = self.adapters[number]  # pyrefly: ignore[bad-assignment]
        seen = self.seen_by(number, latents)
        question, expected = ids_of(batch, number, reader.device, "after")

        # Inputs that stand where the text would stand, and additions to the layers.
        before = put_before(reader, adapter(seen).to(reader.device), len(question))
        added = self.aids[number](seen, len(question) // len(seen), reader.device)

        answered = answer(reader, before, question, expected, added)
        written = decode(reader, before, question, expected.shape[1], added) if write else None

        # The error of the text that is rebuilt from the wire.
        gist = None
        if self.gists:
            rebuilt = self.gists[number](seen).to(reader.device)
            embedded = reader.embed(batch[f"text_{number}"].to(reader.device))

            # In mode `prompt` a text has several wires.
            embedded = embedded.repeat_interleave(len(rebuilt) // len(embedded), 0)
            gist = nn.functional.mse_loss(rebuilt, embedded, reduction="none").mean((1, 2))

        return Read(answered, gist, adapter.drift(), seen, written)


# ---- questions for a reader -----------------------------------------------------------------------------


def put_before(reader: Reader, vectors: Tensor, rows: int) -> Tensor:
    """Return the inputs before each of `rows` questions: the token that begins a sequence, then `vectors` (B, T, W).

    Every row of `vectors` serves the same number of questions.
    """
    beginning = reader.embed(torch.zeros(len(vectors), 1, dtype=torch.int64, device=reader.device))
    return torch.cat((beginning, vectors.to(beginning.dtype)), 1).repeat_interleave(rows // len(vectors), 0)


def ids_of(batch: dict[str, Tensor], number: int, device: torch.device, asked: str) -> tuple[Tensor, Tensor]:
    """Return the ids of questions and answers, one row for each question.

    `asked` is `question`, or `after` for the part of it that follows the wire.
    """
    question = batch[f"{asked}_{number}"].to(device)
    expected = batch[f"answer_{number}"].to(device)
    return question.flatten(0, 1), expected.flatten(0, 1)


@torch.no_grad()
def from_text(reader: Reader, batch: dict[str, Tensor], number: int, most: int | None = None) -> Answered:
    """Answer the same questions with the text itself before them, or its first `most` tokens (0: no context)."""
    question, expected = ids_of(batch, number, reader.device, "question")
    text = batch[f"text_{number}"].to(reader.device)[:, :most]

    # Token 0 begins every sequence.
    ids = torch.cat((text.new_zeros(len(text), 1), text), 1)
    return answer(reader, reader.embed(ids.repeat_interleave(len(question) // len(ids), 0)), question, expected)


@torch.no_grad()
def from_replay(reader: Reader, batch: dict[str, Tensor], number: int) -> Answered:
    """Answer with the reader's embeddings of the text in place of the wire: does that way in lose anything?"""
    question, expected = ids_of(batch, number, reader.device, "question")
    vectors = reader.embed(batch[f"text_{number}"].to(reader.device))
    return answer(reader, put_before(reader, vectors, len(question)), question, expected)
