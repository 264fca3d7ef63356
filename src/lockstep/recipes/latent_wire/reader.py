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

from lockstep.recipes.rotary import Rotation, rotate, rotation_table

EPS = 1e-6
Prefix = Sequence[tuple[Tensor, Tensor]]  # keys and values (B, H, M, D) per layer, seen by every position


@dataclass(frozen=True)
class ReaderShape:
    tokens: str  # which tokenizer
    width: int
    layers: int
    heads: int = 4


class Attention(nn.Module):
    """Self-attention with rotary positions; causal or not, with keys and values put before, if there are any."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, prefix: tuple[Tensor, Tensor] | None = None) -> Tensor:
        B, T, W = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, W // self.heads).permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        q, k = rotate(q, rotation), rotate(k, rotation)
        mask = torch.ones(T, T, dtype=torch.bool, device=x.device).tril() if self.causal else None
        if prefix is not None:
            before_k, before_v = prefix
            k, v = torch.cat((before_k.to(k), k), 2), torch.cat((before_v.to(v), v), 2)
            if mask is not None:
                mask = torch.cat((mask.new_ones(T, before_k.shape[2]), mask), 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(B, T, W))


class Block(nn.Module):
    """Attention and a gated MLP of twice the width, each behind a norm."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, EPS)
        self.attention = Attention(width, heads, causal)
        self.mlp_norm = nn.RMSNorm(width, EPS)
        self.up = nn.Linear(width, 2 * 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, prefix: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, prefix)
        gate, value = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Blocks(nn.ModuleList):
    """One after another. A prefix has keys and values for each."""

    def __init__(self, width: int, heads: int, layers: int, causal: bool):
        super().__init__(Block(width, heads, causal) for _ in range(layers))
        self.head_width = width // heads

    def forward(self, x: Tensor, prefix: Prefix | None = None) -> Tensor:
        rotation = rotation_table(x.shape[1], self.head_width, x.device)
        for number, block in enumerate(self):
            x = block(x, rotation, prefix[number] if prefix is not None else None)
        return x


class Reader(nn.Module):
    """Vectors (B, T, W) to logits (B, T, V). Stays where `home` says, wherever the model around it moves."""

    def __init__(self, tokens: int, shape: ReaderShape):
        super().__init__()
        self.shape = shape
        self.home: str | None = None
        self.embed = nn.Embedding(tokens, shape.width)
        self.blocks = Blocks(shape.width, shape.heads, shape.layers, causal=True)
        self.norm = nn.RMSNorm(shape.width, EPS)
        self.head = nn.Linear(shape.width, tokens, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)

    def forward(self, x: Tensor, prefix: Prefix | None = None) -> Tensor:
        return self.head(self.norm(self.blocks(x, prefix)))

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


def answer(reader: Reader, before: Tensor, question: Tensor, answer: Tensor, prefix: Prefix | None = None) -> Answered:
    """Teacher-forced: [before] [question] [answer]. All tokens right here means that greedy decoding is right.

    before (rows, T, W); question (rows, q), answer (rows, a): ids.
    """
    asked = torch.cat((question, answer[:, :-1]), 1)
    logits = reader(torch.cat((before, reader.embed(asked)), 1), prefix)
    logits = logits[:, -answer.shape[1] :].float()  # the position of the question mark predicts the first token
    cost = F.cross_entropy(logits.transpose(1, 2), answer, reduction="none").mean(1)
    right = logits.argmax(-1) == answer
    return Answered(cost, right.all(1).float(), right[:, 0].float(), logits)
