"""The language models that are frozen: small decoders which answer a question about the text before it.

Shapes in comments: B rows, T positions, W width, H heads, D = W / H, V tokens, M wire vectors, Z their width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.recipes.layers import (
    Rotation,
    SelfAttention,
    gated,
    merge_heads,
    rotate,
    rotation_table,
    split_heads,
    split_qkv,
)

EPS = 1e-6


@dataclass(frozen=True)
class LayerAdditions:
    """The additions of trained modules to one layer, whose own weights stay as they are."""

    prefix: tuple[Tensor, Tensor] | None = None  # keys and values (B, H, M, D) that every position can attend to
    qkv: Callable[[Tensor], Tensor] | None = None  # added to the layer's queries, keys and values, from the same input
    out: Callable[[Tensor], Tensor] | None = None  # added to the output of its attention

    # Added to the stream after its attention, from the stream and `wire`.
    look: Callable[[Tensor, Tensor], Tensor] | None = None

    wire: Tensor | None = None  # the vectors (B, M, Z) that `look` attends to


NOTHING = LayerAdditions()


@dataclass(frozen=True)
class ReaderShape:
    """The sizes of a reader. They are part of the key under which a trained reader is stored."""

    tokens: str  # the name of its tokenizer
    width: int
    layers: int
    heads: int = 4
    near: int = 0  # positions that each layer mixes before it attends: its own and the ones before it


class ReaderAttention(SelfAttention):
    """Self-attention with rotary positions, to which trained modules may add."""

    def forward(self, x: Tensor, rotation: Rotation | None = None, added: LayerAdditions = NOTHING) -> Tensor:
        assert rotation is not None, "readers have rotary positions"
        qkv = self.qkv(x) if added.qkv is None else self.qkv(x) + added.qkv(x)
        q, k, v = split_qkv(qkv, self.heads)
        q = rotate(q, rotation)
        k = rotate(k, rotation)

        # A prefix has no positions, so it is not rotated.
        mask = None
        if added.prefix is not None:
            prefix_k, prefix_v = added.prefix
            k = torch.cat((prefix_k.to(k), k), 2)
            v = torch.cat((prefix_v.to(v), v), 2)

            # The prefix is visible from every position; the rest stays causal.
            if self.causal:
                T, keys = x.shape[1], k.shape[2]
                mask = torch.ones(T, keys, dtype=torch.bool, device=x.device).tril(keys - T)

        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal and mask is None)
        y = merge_heads(y)
        return self.out(y) if added.out is None else self.out(y) + added.out(y)


def cross_attend(q: Tensor, kv: Tensor, heads: int, bias: Tensor | None = None) -> Tensor:
    """Attend from q (B, T, W) to the keys and values in the halves of kv (B, M, 2W)."""
    q, k, v = (split_heads(t, heads) for t in (q, *kv.chunk(2, -1)))
    return merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=bias))


class Near(nn.Module):
    """Adds the last few positions to each position, channel by channel.

    Attention would learn late which words stand together; here it is given.
    """

    def __init__(self, width: int, count: int):
        super().__init__()
        self.norm = nn.RMSNorm(width, EPS)
        self.weight = nn.Parameter(torch.zeros(count, width))  # zeros: at first nothing is mixed

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        count = len(self.weight)

        # Padded on the left: a position never sees what comes after it.
        padded = F.pad(self.norm(x), (0, 0, count - 1, 0))
        return x + sum(padded[:, count - 1 - back : count - 1 - back + T] * self.weight[back] for back in range(count))


class Block(nn.Module):
    """Attention and a gated MLP of twice the width, each after a norm."""

    def __init__(self, width: int, heads: int, causal: bool, near: int = 0):
        super().__init__()
        self.near = Near(width, near) if near else None
        self.attention_norm = nn.RMSNorm(width, EPS)
        self.attention = ReaderAttention(width, heads, causal)
        self.mlp_norm = nn.RMSNorm(width, EPS)
        self.up = nn.Linear(width, 2 * 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, added: LayerAdditions = NOTHING) -> Tensor:
        if self.near is not None:
            x = self.near(x)

        x = x + self.attention(self.attention_norm(x), rotation, added)
        if added.look is not None and added.wire is not None:
            x = x + added.look(x, added.wire)

        return x + self.down(gated(self.up(self.mlp_norm(x))))


class Blocks(nn.ModuleList):
    def __init__(self, width: int, heads: int, layers: int, causal: bool, near: int = 0):
        super().__init__(Block(width, heads, causal, near) for _ in range(layers))
        self.head_width = width // heads

    def forward(self, x: Tensor, added: Sequence[LayerAdditions] | None = None) -> Tensor:
        """Map (B, T, W) to (B, T, W). `added` has one entry for each block."""
        # Made for each call, as questions and texts have many lengths.
        rotation = rotation_table(x.shape[1], self.head_width, x.device)
        for number, block in enumerate(self):
            x = block(x, rotation, added[number] if added is not None else NOTHING)

        return x


class Reader(nn.Module):
    """A decoder from vectors (B, T, W) to logits (B, T, V). Once frozen, it can stay on a device of its own."""

    def __init__(self, tokens: int, shape: ReaderShape):
        super().__init__()
        self.shape = shape
        self.fixed_device: str | None = None  # where it stays when the model around it moves

        # The order of creation fixes the weights that a seed gives, and so the digests of stored readers.
        self.embed = nn.Embedding(tokens, shape.width)
        self.blocks = Blocks(shape.width, shape.heads, shape.layers, causal=True, near=shape.near)
        self.norm = nn.RMSNorm(shape.width, EPS)
        self.head = nn.Linear(shape.width, tokens, bias=False)

        # Smaller than torch's default of 1.
        nn.init.normal_(self.embed.weight, std=0.5)

    def forward(self, x: Tensor, added: Sequence[LayerAdditions] | None = None, last: int = 0) -> Tensor:
        """Return the logits of the `last` positions, or of all if it is 0."""
        return self.head(self.norm(self.blocks(x, added)[:, -last:]))

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def freeze(self, device: str | None) -> Reader:
        """Freeze the reader and keep it on `device` if one is given. "cuda:+2" is two after this rank's own."""
        self.requires_grad_(False).eval()

        # Relative to the rank, so that one setting serves all ranks.
        if device is not None and device.startswith("cuda:+"):
            device = f"cuda:{torch.cuda.current_device() + int(device.removeprefix('cuda:+'))}"

        # From here on `_apply` ignores moves.
        if device is not None:
            self.to(device)
            self.fixed_device = device

        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Reader:
        """Ignore `.to()`, `.cuda()` and the like if the reader has a device of its own.

        They come from this module or from one around it.
        """
        return self if self.fixed_device is not None else super()._apply(fn, recurse)

    def train(self, mode: bool = True) -> Reader:
        """Stay in evaluation mode if the reader is frozen."""
        return super().train(mode and any(p.requires_grad for p in self.parameters()))


@dataclass
class Answered:
    """A reader's answers: per row, averaged over the tokens of the answer."""

    cost: Tensor  # (rows,) cross entropy
    right: Tensor  # (rows,) 1.0 if the whole answer is right
    first: Tensor  # (rows,) 1.0 if its first token is
    logits: Tensor  # (rows, tokens of the answer, V)


def answer(
    reader: Reader, before: Tensor, question: Tensor, answer: Tensor, added: Sequence[LayerAdditions] | None = None
) -> Answered:
    """Score the answers with teacher forcing: [before] [question] [answer].

    If all tokens are right here, greedy decoding would write the same answer.

    before    (rows, T, W)
    question  (rows, tokens), ids
    answer    (rows, tokens), ids
    """
    read = torch.cat((question, answer[:, :-1]), 1)

    # The position of the question mark predicts the first token of the answer.
    logits = reader(torch.cat((before, reader.embed(read)), 1), added, last=answer.shape[1]).float()
    cost = F.cross_entropy(logits.transpose(1, 2), answer, reduction="none").mean(1)

    right = logits.argmax(-1) == answer
    return Answered(cost, right.all(1).float(), right[:, 0].float(), logits)


@torch.compiler.disable  # it runs rarely, and its graph would be long
def decode(
    reader: Reader, before: Tensor, question: Tensor, length: int, added: Sequence[LayerAdditions] | None = None
) -> Tensor:
    """Return the answer (rows, length) that the reader writes by greedy decoding."""
    # Without a cache of keys and values: answers have few tokens.
    x = torch.cat((before, reader.embed(question)), 1)
    written: list[Tensor] = []
    for _ in range(length):
        written.append(reader(x, added, last=1).argmax(-1))
        x = torch.cat((x, reader.embed(written[-1]).to(x.dtype)), 1)

    return torch.cat(written, 1)
