"""The Hierarchical Reasoning Model, and its tiny sibling TRM.

Two states, a slow one (z_h) and a fast one (z_l), are updated in turn for one *segment*. The caller keeps the states
and calls the model again with the same puzzle until the answer is good enough.

Shapes in comments: B puzzles, S cells, P leading positions for the puzzle's own vector, W width, V symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lockstep.recipes.hrm.losses import Score, Scoring, SegmentTargets
from lockstep.recipes.layers import Rotation, SelfAttention, gated, rms, rotation_table

Update = Callable[..., Tensor]  # a level, or a function that calls it

EPS = 1e-5
TRUNCATED_STD = 0.8796256610342398  # the standard deviation of a unit normal that is truncated at -2 and 2


# The values of options that are None, by variant.
VARIANT_DEFAULTS: dict[str, dict[str, Any]] = {
    "hrm": {
        "layers": 4, "h_cycles": 2, "l_cycles": 2, "grad_cycle": "one_step", "puzzle_positions": 1,
    },
    "trm": {
        "layers": 2, "h_cycles": 3, "l_cycles": 6, "grad_cycle": "full", "puzzle_positions": 16,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HRMOptions:
    """Options of the model. None takes the variant's own value."""

    # hrm, or trm: one module for both levels.
    variant: str = "hrm"
    width: int = 512
    heads: int = 8

    # Blocks of a level.
    layers: int | None = None

    # A segment has h_cycles slow updates, each after l_cycles fast ones.
    h_cycles: int | None = None
    l_cycles: int | None = None

    # one_step, or full: gradients through the whole last cycle.
    grad_cycle: str | None = None

    # rope or learned.
    positions: str = "rope"

    # attention, or mlp: positions are mixed by fixed weights.
    mixer: str = "attention"

    # Positions for the vector of the puzzle's id.
    puzzle_positions: int | None = None

    def filled_in(self) -> HRMOptions:
        # A wrong variant is reported together with all other problems, so it must not fail here.
        defaults = VARIANT_DEFAULTS.get(self.variant, VARIANT_DEFAULTS["hrm"])
        return replace(self, **{name: value for name, value in defaults.items() if getattr(self, name) is None})


@dataclass(frozen=True, kw_only=True)
class ModelConfig(HRMOptions):
    """The options of a model without None, and what its puzzles ask of it."""

    symbols: int  # V, including the padding symbol 0
    cells: int  # S
    puzzle_ids: int = 1  # rows of the table of puzzle vectors
    expansion: float = 4.0  # the expansion of the gated MLPs

    layers: int = 4
    h_cycles: int = 2
    l_cycles: int = 2
    grad_cycle: str = "one_step"
    puzzle_positions: int = 1  # P

    @property
    def positions_in_all(self) -> int:
        return self.puzzle_positions + self.cells


class Thought(NamedTuple):
    """The result of one segment. The states carry no gradient."""

    z_h: Tensor  # (B, P + S, W)
    z_l: Tensor  # (B, P + S, W)
    logits: Tensor  # (B, S, V)
    q: Tensor  # (B, 2): the value of halting and of continuing; TRM has only the first
    next_q: Tensor | None  # q after one more segment, without gradient, if `look_ahead` was set
    score: Score | None  # if a question was given


class SparseEmbedding(nn.Module):
    """A vector for every puzzle id, in a table that autograd does not see as a whole."""

    def __init__(self, ids: int, width: int):
        super().__init__()
        self.register_buffer("table", torch.zeros(ids, width))

    def forward(self, ids: Tensor) -> Tensor:
        """Copy out the rows (B, W) of `ids` (B,) as a leaf tensor, whose `.grad` the table's optimizer reads."""
        return self.table[ids.long()].requires_grad_(torch.is_grad_enabled())


class SwiGLU(nn.Module):
    def __init__(self, width: int, expansion: float):
        super().__init__()
        # Three matrices instead of two: two thirds of the inner width give as many parameters as a plain MLP has. It is
        # rounded up to a multiple of 256 for the matrix kernels.
        inner = -(-round(expansion * width * 2 / 3) // 256) * 256
        self.up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gated(self.up(x)))


class Block(nn.Module):
    """A post-norm block: x = rms(x + mix(x)), then x = rms(x + mlp(x)). The norm has no weights.

    The output has the dtype of the block's matrix products. Under autocast norms would return float32; this way half as
    many bytes move.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attends = config.mixer == "attention"
        if self.attends:
            self.mix = SelfAttention(config.width, config.heads)
        else:
            self.mix = SwiGLU(config.positions_in_all, config.expansion)

        self.mlp = SwiGLU(config.width, config.expansion)

    def forward(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        # The MLP mixes positions, so they have to be its channels.
        mixed = self.mix(x, rotation) if self.attends else self.mix(x.transpose(1, 2)).transpose(1, 2)

        x = rms(x + mixed, EPS).to(mixed.dtype)
        change = self.mlp(x)
        return rms(x + change, EPS).to(change.dtype)


class Level(nn.Module):
    """One update of a state: add the state of the other level, then run the blocks."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))

    def forward(
        self, state: Tensor, injection: Tensor, rotation: Rotation | None, more: Tensor | None = None
    ) -> Tensor:
        """Update `state` (B, P + S, W) with `injection`, and with `more` if it is given."""
        x = state + (injection if more is None else injection + more)
        for block in self.blocks:
            x = block(x, rotation)

        return x


class HierarchicalReasoningModel(nn.Module):
    """The whole model: one call runs one segment."""

    def __init__(self, config: ModelConfig, scoring: Scoring | None = None):
        super().__init__()
        self.config = config
        self.scoring = scoring
        W = config.width
        hrm = config.variant == "hrm"  # TRM has one level, and no value of continuing

        # The order of creation fixes the random numbers that a seed gives to each part.
        self.embed = nn.Embedding(config.symbols, W)
        self.places = nn.Embedding(config.positions_in_all, W) if config.positions == "learned" else None
        self.low = Level(config)
        self.high = Level(config) if hrm else None  # None: `low` serves for both levels
        self.head = nn.Linear(W, config.symbols, bias=False)
        self.q_head = nn.Linear(W, 2 if hrm else 1)
        self.puzzle_emb = SparseEmbedding(config.puzzle_ids, W)

        # The initial states are drawn once and stay fixed.
        self.register_buffer("h_start", _truncated_normal(torch.empty(W), 1.0))
        self.register_buffer("l_start", _truncated_normal(torch.empty(W), 1.0))

        # The angles follow from the configuration: they move with the model and are not saved.
        self.rotary = config.positions == "rope" and config.mixer == "attention"
        if self.rotary:
            cos, sin = rotation_table(config.positions_in_all, W // config.heads)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)

        draw_weights(self.modules())
        self._reset_halting()

    def _reset_halting(self) -> None:
        """Make halting look worthless at first, whatever the state: an untrained model should not stop early."""
        nn.init.zeros_(self.q_head.weight)
        nn.init.constant_(self.q_head.bias, -5.0)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the parts: a segment calls a level up to a dozen times, and each call would be compiled again."""
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
        question: SegmentTargets | None = None,
    ) -> Thought:
        """Run one segment.

        z_h, z_l    (B, P + S, W), the states
        inputs      (B, S), the symbols of the puzzle
        puzzle      (B, W), the vector of each puzzle's id
        look_ahead  also compute what q would be after one more segment
        begin       (B,), the puzzles whose states are reset first
        question    score the answer
        """
        rotation = (self.cos, self.sin) if self.rotary else None

        # A new puzzle in a slot must not see the states of the one before.
        if begin is not None:
            begin = begin[:, None, None]
            z_h = torch.where(begin, self.h_start.to(z_h.dtype), z_h)
            z_l = torch.where(begin, self.l_start.to(z_l.dtype), z_l)

        # The segment itself.
        x = self._embedded(inputs, puzzle).to(z_h.dtype)
        low = _with_converted_weights(self.low)
        high = low if self.high is None else _with_converted_weights(self.high)
        z_h, z_l = self._segment(low, high, z_h, z_l, x, rotation)

        # The answer stands in the positions of the cells, the values of halting in the first position.
        logits = self.head(z_h)[:, self.config.puzzle_positions :]
        q = self.q_head(z_h[:, 0])

        # Gradients end with the segment: the next one starts from detached states.
        z_h = z_h.detach()
        z_l = z_l.detach()

        # The target for the value of continuing: a second segment, without gradients.
        next_q = None
        if look_ahead:
            with torch.no_grad():
                next_q = self.q_head(self._segment(low, high, z_h, z_l, x, rotation)[0][:, 0])

        score = None
        if question is not None:
            assert self.scoring is not None, "a question needs a model with scoring"
            score = self.scoring(z_h, logits, q, next_q, question)

            # All gradients come through the score.
            logits = logits.detach()
            q = q.detach()

        return Thought(z_h, z_l, logits, q, next_q, score)

    def start(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the initial states of `count` puzzles, in the dtype that a segment leaves them in."""
        shape = (count, self.config.positions_in_all, self.config.width)

        # Under autocast a segment leaves its states in the dtype of the matrix products.
        device = self.h_start.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.h_start.dtype

        # Contiguous, as a segment leaves its states: another layout would be compiled for again.
        return self.h_start.to(dtype).expand(shape).contiguous(), self.l_start.to(dtype).expand(shape).contiguous()

    def _embedded(self, inputs: Tensor, puzzle: Tensor) -> Tensor:
        """Embed the cells after the puzzle's vector, which is padded with zeros to P positions: (B, P + S, W)."""
        W = self.config.width
        P = self.config.puzzle_positions

        lead = nn.functional.pad(puzzle, (0, P * W - puzzle.shape[1])).view(-1, P, W)
        x = torch.cat((lead.to(self.embed.weight.dtype), self.embed(inputs.long())), dim=1)

        # The sum of two has twice the variance.
        if self.places is not None:
            x = 0.5**0.5 * (x + self.places.weight)

        # Embeddings are drawn with a deviation of W^-0.5: this makes it 1.
        return W**0.5 * x

    def _segment(
        self, low: Update, high: Update, z_h: Tensor, z_l: Tensor, x: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor]:
        """Run h_cycles times l_cycles fast updates and a slow one. Only the last updates keep their gradients."""
        cycle = ["l"] * self.config.l_cycles + ["h"]
        updates = cycle * self.config.h_cycles
        with_gradient = 2 if self.config.grad_cycle == "one_step" else len(cycle)

        # Autograd would otherwise keep the activations of all updates.
        for number, which in enumerate(updates):
            keep = torch.is_grad_enabled() and number >= len(updates) - with_gradient
            with torch.set_grad_enabled(keep):
                if which == "l":
                    z_l = low(z_l, z_h, rotation, x if keep else x.detach())
                else:
                    z_h = high(z_h, z_l, rotation)

        return z_h, z_l


def _with_converted_weights(level: Level) -> Update:
    """Return a function that calls `level`, with its weights converted to autocast's dtype once if it is compiled.

    A compiled level would convert them in each of a dozen calls. Eager autocast caches converted weights by itself.
    """
    weights = dict(level.named_parameters())
    device = next(iter(weights.values())).device.type
    # Sharded weights (DTensors) would have to be gathered first.
    sharded = any(hasattr(weight, "placements") for weight in weights.values())

    if level._compiled_call_impl is None or sharded or not torch.is_autocast_enabled(device):
        return level

    converted = {name: weight.to(torch.get_autocast_dtype(device)) for name, weight in weights.items()}
    return lambda *args: functional_call(level, converted, args)


def draw_weights(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, nn.Linear | nn.Embedding):
            # By the last dimension: the inputs of a linear layer, the width of an embedding.
            _truncated_normal(module.weight, module.weight.shape[1] ** -0.5)


def _truncated_normal(tensor: Tensor, std: float) -> Tensor:
    """Fill `tensor` from a truncated normal whose standard deviation is really `std`: truncation makes it smaller."""
    untruncated = std / TRUNCATED_STD
    return nn.init.trunc_normal_(tensor, std=untruncated, a=-2 * untruncated, b=2 * untruncated)
