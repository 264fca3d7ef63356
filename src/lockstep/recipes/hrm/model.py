"""The Hierarchical Reasoning Model, and its tiny sibling TRM.

Two states, one slow (z_h) and one fast (z_l), are updated in turn for one *segment*. Whoever calls the model keeps
the states and calls it again, with the same puzzle, until the answer is good enough.

Shapes in comments: B puzzles, S cells, P leading positions for the puzzle's own vector, W width, H heads, V symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lockstep.recipes.hrm.score import Question, Score, Scoring
from lockstep.recipes.hrm.sparse import SparseEmbedding
from lockstep.recipes.rotary import Rotation, rotate, rotation_table

Update = Callable[..., Tensor]  # a level, or what calls it

EPS = 1e-5
CUT_STD = 0.8796256610342398  # the standard deviation of a normal that is cut off at two of its own


@dataclass(frozen=True)
class ModelConfig:
    symbols: int  # V, the padding symbol 0 included
    cells: int  # S
    puzzle_ids: int = 1
    variant: str = "hrm"  # or "trm": one module in both roles, no q_continue
    width: int = 512
    heads: int = 8
    layers: int = 4  # blocks of a level
    expansion: float = 4.0
    h_cycles: int = 2
    l_cycles: int = 2
    grad_cycle: str = "one_step"  # or "full": gradients through the whole last cycle
    positions: str = "rope"  # or "learned"
    mixer: str = "attention"  # or "mlp": positions are mixed by fixed weights
    puzzle_positions: int = 1  # P


class Thought(NamedTuple):
    """What one segment leaves. The states carry no gradient."""

    z_h: Tensor  # (B, P + S, W)
    z_l: Tensor
    logits: Tensor  # (B, S, V)
    q: Tensor  # (B, 2): the worth of halting, and of going on; TRM has only the first
    next_q: Tensor | None  # the same after one more segment, without gradient, where that was asked for
    score: Score | None  # where there was a question


class Attention(nn.Module):
    """Every position sees every other."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        B, T, W = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, W // self.heads).permute(2, 0, 3, 1, 4)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        y = F.scaled_dot_product_attention(q, k, v)  # (B, H, T, W / H)
        return self.out(y.transpose(1, 2).reshape(B, T, W))


class SwiGLU(nn.Module):
    def __init__(self, width: int, expansion: float):
        super().__init__()
        inner = -(-round(expansion * width * 2 / 3) // 256) * 256  # a multiple of 256, for the matrix kernels
        self.up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class Block(nn.Module):
    """Post-norm: x = rms(x + mix(x)), then x = rms(x + mlp(x)); the norm has no weights.

    What it returns has the format that its products are computed in: under autocast, which would have norms return
    float32, that halves what has to be moved."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        places = config.puzzle_positions + config.cells
        self.attends = config.mixer == "attention"
        self.mix = Attention(config.width, config.heads) if self.attends else SwiGLU(places, config.expansion)
        self.mlp = SwiGLU(config.width, config.expansion)

    def reset_parameters(self) -> None:
        draw_weights(self.modules())

    def forward(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        mixed = self.mix(x, rotation) if self.attends else self.mix(x.transpose(1, 2)).transpose(1, 2)
        x = rms(x + mixed).to(mixed.dtype)
        change = self.mlp(x)
        return rms(x + change).to(change.dtype)


class Level(nn.Module):
    """One update of a state: add what comes from the other level, then think."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))

    def forward(
        self, state: Tensor, injection: Tensor, rotation: Rotation | None, more: Tensor | None = None
    ) -> Tensor:
        x = state + (injection if more is None else injection + more)
        for block in self.blocks:
            x = block(x, rotation)
        return x


class HierarchicalReasoningModel(nn.Module):
    def __init__(self, config: ModelConfig, scoring: Scoring | None = None):
        super().__init__()
        self.config, self.scoring = config, scoring
        W, places = config.width, config.puzzle_positions + config.cells
        self.embed = nn.Embedding(config.symbols, W)
        self.places = nn.Embedding(places, W) if config.positions == "learned" else None
        self.low = Level(config)
        self.high = Level(config) if config.variant == "hrm" else None  # TRM: `low` plays both parts
        self.head = nn.Linear(W, config.symbols, bias=False)
        self.q_head = nn.Linear(W, 2 if config.variant == "hrm" else 1)
        self.puzzle_emb = SparseEmbedding(config.puzzle_ids, W)
        self.register_buffer("h_start", _cut_normal(torch.empty(W), 1.0))
        self.register_buffer("l_start", _cut_normal(torch.empty(W), 1.0))
        self.turned = config.positions == "rope" and config.mixer == "attention"
        if self.turned:
            cos, sin = rotation_table(places, W // config.heads)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)
        self.initialise()

    def initialise(self) -> None:
        draw_weights(self.modules())
        self._begin_unwilling()

    def reset_parameters(self) -> None:
        """What is outside the blocks, for init=meta."""
        draw_weights(filter(None, (self.embed, self.places, self.head, self.q_head)))
        self._begin_unwilling()

    def _begin_unwilling(self) -> None:
        """Halting begins as something that is hardly ever worth it, whatever the state."""
        nn.init.zeros_(self.q_head.weight)
        nn.init.constant_(self.q_head.bias, -5.0)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Its parts: a segment calls a level up to a dozen times, and would be compiled a dozen times over."""
        for part in filter(None, (self.low, self.high, self.scoring)):
            part.compile(*args, **kwargs)

    def forward(
        self,
        z_h: Tensor,
        z_l: Tensor,
        inputs: Tensor,
        puzzle: Tensor,
        look_ahead: bool = False,
        begin: Tensor | None = None,
        question: Question | None = None,
    ) -> Thought:
        """One segment. States (B, P + S, W), `inputs` (B, S), `puzzle` (B, W): the vector of each puzzle's id.
        `look_ahead` also tells what q would be after one more. Where `begin` (B,) is true the states begin anew.
        With a `question` the answer is scored."""
        rotation = (self.cos, self.sin) if self.turned else None
        if begin is not None:
            begin = begin[:, None, None]
            z_h = torch.where(begin, self.h_start.to(z_h.dtype), z_h)
            z_l = torch.where(begin, self.l_start.to(z_l.dtype), z_l)
        x = self._embedded(inputs, puzzle).to(z_h.dtype)
        low = _converted(self.low)
        levels = low, low if self.high is None else _converted(self.high)
        z_h, z_l = self._segment(levels, z_h, z_l, x, rotation)
        logits, q = self.head(z_h)[:, self.config.puzzle_positions :], self.q_head(z_h[:, 0])
        z_h, z_l = z_h.detach(), z_l.detach()
        next_q = None
        if look_ahead:
            with torch.no_grad():
                next_q = self.q_head(self._segment(levels, z_h, z_l, x, rotation)[0][:, 0])
        score = None
        if question is not None:
            assert self.scoring is not None, "a question, and nobody to judge the answer"
            score = self.scoring(z_h, logits, q, next_q, question)
            logits, q = logits.detach(), q.detach()  # gradients come through the score, and nowhere else
        return Thought(z_h, z_l, logits, q, next_q, score)

    def start(self, count: int) -> tuple[Tensor, Tensor]:
        """The states in which a puzzle begins, in the format that a segment leaves them in."""
        shape = (count, self.config.puzzle_positions + self.config.cells, self.config.width)
        device = self.h_start.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.h_start.dtype
        # Written out: code that was compiled for states of this layout need not be compiled again for others.
        return self.h_start.to(dtype).expand(shape).contiguous(), self.l_start.to(dtype).expand(shape).contiguous()

    def _embedded(self, inputs: Tensor, puzzle: Tensor) -> Tensor:
        """(B, P + S, W); the puzzle's vector stands first, with zeros in the places that it does not fill."""
        W, P = self.config.width, self.config.puzzle_positions
        lead = F.pad(puzzle, (0, P * W - puzzle.shape[1])).view(-1, P, W)
        x = torch.cat((lead.to(self.embed.weight.dtype), self.embed(inputs.long())), dim=1)
        if self.places is not None:
            x = 0.5**0.5 * (x + self.places.weight)
        return W**0.5 * x

    def _segment(
        self, levels: tuple[Update, Update], z_h: Tensor, z_l: Tensor, x: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor]:
        """h_cycles times: l_cycles fast updates, then a slow one. Only the last ones are remembered for gradients."""
        config, (low, high) = self.config, levels
        cycle = ["l"] * config.l_cycles + ["h"]
        with_gradient = 2 if config.grad_cycle == "one_step" else len(cycle)
        updates = cycle * config.h_cycles
        for place, which in enumerate(updates):
            remember = torch.is_grad_enabled() and place >= len(updates) - with_gradient
            with torch.set_grad_enabled(remember):
                if which == "l":
                    z_l = low(z_l, z_h, rotation, x if remember else x.detach())
                else:
                    z_h = high(z_h, z_l, rotation)
        return z_h, z_l


def _converted(level: Level) -> Update:
    """Compiled, a level would convert its weights to autocast's format in each of a dozen calls: once is enough.
    Otherwise autocast remembers them by itself."""
    weights = dict(level.named_parameters())
    device = next(iter(weights.values())).device.type
    cut = any(hasattr(weight, "placements") for weight in weights.values())
    if level._compiled_call_impl is None or cut or not torch.is_autocast_enabled(device):
        return level
    dtype = torch.get_autocast_dtype(device)
    ready = {name: weight.to(dtype) for name, weight in weights.items()}
    return lambda *args: functional_call(level, ready, args)


def rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=EPS)


def draw_weights(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, nn.Linear):
            _cut_normal(module.weight, module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            _cut_normal(module.weight, module.embedding_dim**-0.5)


def _cut_normal(tensor: Tensor, std: float) -> Tensor:
    """A normal without tails whose standard deviation is really `std`: cutting makes it smaller."""
    nn.init.trunc_normal_(tensor, std=std / CUT_STD, a=-2 * std / CUT_STD, b=2 * std / CUT_STD)
    return tensor
