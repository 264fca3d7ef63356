"""The language models that are frozen: small decoders which answer a question about the text before it.

Shapes in comments: B rows, T positions, W width, H heads, D = W / H.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.recipes.layers import Rotation, rotate, rotation_table

EPS = 1e-6
Change = Callable[[Tensor], Tensor]
LookAt = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Aid:
    """What trained parts add to one layer, whose own weights stay as they are."""

    prefix: tuple[Tensor, Tensor] | None = None  # keys and values (B, H, M, D), seen by every position
    qkv: Change | None = None  # added to the layer's queries, keys and values, from the same input
    out: Change | None = None  # added to what its attention gives
    look: LookAt | None = None  # added to the stream behind its attention; looks at `wire`
    wire: Tensor | None = None  # (B, M, Z)


NO_AID = Aid()


@dataclass(frozen=True)
class ReaderShape:
    tokens: str  # which tokenizer
    width: int
    layers: int
    heads: int = 4
    near: int = 0  # positions that each layer mixes before it attends: the last so many, itself among them


class Attention(nn.Module):
    """Self-attention with rotary positions; causal or not, with keys and values put before, if there are any."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, aid: Aid = NO_AID) -> Tensor:
        B, T, W = x.shape
        qkv = self.qkv(x) if aid.qkv is None else self.qkv(x) + aid.qkv(x)
        q, k, v = qkv.view(B, T, 3, self.heads, W // self.heads).permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        q, k = rotate(q, rotation), rotate(k, rotation)
        mask = None
        if aid.prefix is not None:
            before_k, before_v = aid.prefix
            k, v = torch.cat((before_k.to(k), k), 2), torch.cat((before_v.to(v), v), 2)
            if self.causal:
                mask = torch.ones(T, k.shape[2], dtype=torch.bool, device=x.device).tril(k.shape[2] - T)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal and mask is None)
        y = y.transpose(1, 2).reshape(B, T, W)
        return self.out(y) if aid.out is None else self.out(y) + aid.out(y)


class Near(nn.Module):
    """Adds to each position the last few before it, channel by channel. To tell which words stand together is then no
    longer a matter of attention, which learns it late."""

    def __init__(self, width: int, count: int):
        super().__init__()
        self.norm = nn.RMSNorm(width, EPS)
        self.weight = nn.Parameter(torch.zeros(count, width))  # at first nothing is mixed

    def forward(self, x: Tensor) -> Tensor:
        T, count = x.shape[1], len(self.weight)
        padded = F.pad(self.norm(x), (0, 0, count - 1, 0))
        return x + sum(padded[:, count - 1 - back : count - 1 - back + T] * self.weight[back] for back in range(count))


class Block(nn.Module):
    """Attention and a gated MLP of twice the width, each behind a norm."""

    def __init__(self, width: int, heads: int, causal: bool, near: int = 0):
        super().__init__()
        self.near = Near(width, near) if near else None
        self.attention_norm = nn.RMSNorm(width, EPS)
        self.attention = Attention(width, heads, causal)
        self.mlp_norm = nn.RMSNorm(width, EPS)
        self.up = nn.Linear(width, 2 * 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, aid: Aid = NO_AID) -> Tensor:
        if self.near is not None:
            x = self.near(x)
        x = x + self.attention(self.attention_norm(x), rotation, aid)
        if aid.look is not None and aid.wire is not None:
            x = x + aid.look(x, aid.wire)
        gate, value = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Blocks(nn.ModuleList):
    """One after another, each with its aid, if there are any."""

    def __init__(self, width: int, heads: int, layers: int, causal: bool, near: int = 0):
        super().__init__(Block(width, heads, causal, near) for _ in range(layers))
        self.head_width = width // heads

    def forward(self, x: Tensor, aids: Sequence[Aid] | None = None) -> Tensor:
        rotation = rotation_table(x.shape[1], self.head_width, x.device)
        for number, block in enumerate(self):
            x = block(x, rotation, aids[number] if aids is not None else NO_AID)
        return x


class Reader(nn.Module):
    """Vectors (B, T, W) to logits (B, T, V), or those of the `last` positions. Stays where `home` says, wherever the
    model around it moves."""

    def __init__(self, tokens: int, shape: ReaderShape):
        super().__init__()
        self.shape = shape
        self.home: str | None = None
        self.embed = nn.Embedding(tokens, shape.width)
        self.blocks = Blocks(shape.width, shape.heads, shape.layers, causal=True, near=shape.near)
        self.norm = nn.RMSNorm(shape.width, EPS)
        self.head = nn.Linear(shape.width, tokens, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)

    def forward(self, x: Tensor, aids: Sequence[Aid] | None = None, last: int = 0) -> Tensor:
        return self.head(self.norm(self.blocks(x, aids)[:, -last:]))

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def beginning(self, rows: int) -> Tensor:
        return self.embed(torch.zeros(rows, 1, dtype=torch.int64, device=self.device))  # (B, 1, W)

    def settle(self, home: str | None) -> Reader:
        """Frozen from here on, and on the device `home`, if there is one. "cuda:+2": two after this rank's own."""
        self.requires_grad_(False).eval()
        if home is not None and home.startswith("cuda:+"):
            home = f"cuda:{torch.cuda.current_device() + int(home[6:])}"
        if home is not None:
            self.to(home)
        self.home = home
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """`.to()`, `.cuda()` and their like, of this module or of one around it."""
        return self if self.home is not None else super()._apply(fn, recurse)

    def train(self, mode: bool = True) -> Reader:
        """A frozen model does not change its ways while the rest trains."""
        frozen = not any(p.requires_grad for p in self.parameters())
        return super().train(mode and not frozen)


@dataclass
class Answered:
    """What a reader made of questions: per row, averaged over the tokens of the answer."""

    cost: Tensor  # (rows,) cross entropy
    right: Tensor  # (rows,) 1.0: the whole answer is right
    first: Tensor  # (rows,) 1.0: its first token is
    logits: Tensor  # (rows, answer, V)


def answer(
    reader: Reader, before: Tensor, question: Tensor, answer: Tensor, aids: Sequence[Aid] | None = None
) -> Answered:
    """Teacher-forced: [before] [question] [answer]. All tokens right here means that greedy decoding is right.

    before (rows, T, W); question (rows, q), answer (rows, a): ids.
    """
    asked = torch.cat((question, answer[:, :-1]), 1)
    # The position of the question mark predicts the first token.
    logits = reader(torch.cat((before, reader.embed(asked)), 1), aids, last=answer.shape[1]).float()
    cost = F.cross_entropy(logits.transpose(1, 2), answer, reduction="none").mean(1)
    right = logits.argmax(-1) == answer
    return Answered(cost, right.all(1).float(), right[:, 0].float(), logits)


@torch.compiler.disable  # rarely run, and a graph of it would be long
def decode(reader: Reader, before: Tensor, question: Tensor, length: int, aids: Sequence[Aid] | None = None) -> Tensor:
    """The answer (rows, length) that the reader writes by itself, always the likeliest token."""
    x = torch.cat((before, reader.embed(question)), 1)
    said: list[Tensor] = []
    for _ in range(length):
        said.append(reader(x, aids, last=1).argmax(-1))
        x = torch.cat((x, reader.embed(said[-1]).to(x.dtype)), 1)
    return torch.cat(said, 1)
