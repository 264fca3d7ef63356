"""What memory and money a training run takes: the tables of the course, computed, with its errors corrected.

Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

GB = 1e9
Strategy = Literal["ddp", "zero1", "zero2", "fsdp"]
STRATEGIES: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "fsdp")


@dataclass(frozen=True)
class Format:
    """Bytes per parameter that a way of storing numbers takes."""

    parameter: float
    gradient: float
    optimizer: float


# AdamW keeps two averages per parameter. In mixed precision it also keeps a float32 copy of the weights.
FORMATS = {
    "fp32": Format(4, 4, 8),
    "mixed": Format(2, 2, 12),
    "course": Format(2, 2, 4),  # what the course's table counts: two averages in 2 bytes each, and no copy
}


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank, without activations."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """The sum of the three."""
        return self.parameters + self.gradients + self.optimizer


def memory(count: float, gpus: int, strategy: Strategy, kind: str = "mixed") -> RankMemory:
    """Return the bytes that one of `gpus` ranks holds for a model of `count` parameters.

    ZeRO 1 divides the optimizer's state by the number of ranks, ZeRO 2 gradients as well, FSDP (ZeRO 3) parameters too.
    """
    stored = FORMATS[kind]

    # ZeRO 1, 2 and 3 divide one kind of state more each, in this order.
    divided = STRATEGIES.index(strategy)
    return RankMemory(
        count * stored.parameter / (gpus if divided >= 3 else 1),
        count * stored.gradient / (gpus if divided >= 2 else 1),
        count * stored.optimizer / (gpus if divided >= 1 else 1),
    )


def fewest_gpus(count: float, capacity: float) -> int:
    """Return on how many GPUs of `capacity` bytes the fully sharded state of a model fits, without activations."""
    return math.ceil(memory(count, 1, "fsdp").total / capacity)


def cost(gpus: int, hours: float, price: float) -> float:
    """Return the price of `gpus` GPUs for `hours` at `price` dollars for one GPU and hour."""
    return gpus * hours * price


def cost_at(paid: float, before: float, after: float) -> float:
    """Return what the same training costs if the GPUs are busy for a share `after` of the time instead of `before`."""
    return paid * before / after


def flops(parameters: float, tokens: float) -> float:
    """Return the operations of training a transformer: 6 for each parameter and token."""
    return 6 * parameters * tokens


# ---- The tables of the course ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class CourseFigure:
    """A figure of the course: what it says, what comes out here, and what is wrong with it, if anything."""

    what: str
    course: str
    computed: str
    wrong: str = ""


def _gb(count: float) -> str:
    """Return bytes as text."""
    return f"{count / GB:,.0f} GB"


def memory_rows() -> list[CourseFigure]:
    """Return the course's tables of memory: GPT-3, and a model of 70 billion parameters on 4 GPUs."""
    count, gpus = 70e9, 4
    replicated, sharded = memory(count, gpus, "ddp"), memory(count, gpus, "fsdp")

    as_in_course = memory(count, gpus, "fsdp", "course")
    adam = "the original counts 4 bytes per parameter; two float32 averages and a float32 copy of the weights are 12"
    state = "the state is 16 bytes per parameter in both; activations are what gets smaller"
    fit = f"not even the original's own {_gb(as_in_course.total)} per GPU fit into 80 GB"

    # Mixed precision halves weights and gradients, but keeps a float32 copy of the weights.
    saved = 1 - replicated.total / memory(count, gpus, "ddp", "fp32").total
    return [
        CourseFigure("GPT-3, 175 billion parameters in fp32", "700 GB", _gb(175e9 * 4)),
        CourseFigure("70 billion parameters in fp32", "280 GB", _gb(count * 4)),
        CourseFigure("70 billion parameters in fp16 or bf16", "140 GB", _gb(count * 2)),
        CourseFigure("DDP, parameters on 4 GPUs", "560 GB", _gb(gpus * replicated.parameters)),
        CourseFigure("DDP, gradients on 4 GPUs", "560 GB", _gb(gpus * replicated.gradients)),
        CourseFigure("DDP, AdamW on 4 GPUs", "1,120 GB", _gb(gpus * replicated.optimizer), adam),
        CourseFigure("DDP, total on 4 GPUs", "2,240 GB", _gb(gpus * replicated.total), adam),
        CourseFigure("FSDP, parameters per GPU", "35 GB", _gb(sharded.parameters)),
        CourseFigure("FSDP, gradients per GPU", "35 GB", _gb(sharded.gradients)),
        CourseFigure("FSDP, AdamW per GPU", "70 GB", _gb(sharded.optimizer), adam),
        CourseFigure("FSDP, total on 4 GPUs", "560 GB", _gb(gpus * sharded.total), adam),
        CourseFigure("DDP takes more than FSDP, times", "4", f"{replicated.total / sharded.total:g}"),
        CourseFigure("mixed precision saves, of the state", "50 %", f"{100 * saved:.0f} %", state),
        CourseFigure("fewest GPUs of 80 GB for this state", "4", f"{fewest_gpus(count, 80 * GB)}", fit),
    ]


def cost_rows() -> list[CourseFigure]:
    """Return the course's figures of money and time."""
    week = 7 * 24
    low, high = cost(1000, week, 2), cost(1000, week, 4)
    busy = cost_at(high, 0.6, 0.9)

    # FLOP per second and GPU: 10,000 GPUs for 96 days.
    gpt3 = flops(175e9, 300e9) / (10_000 * 96 * 86400)
    return [
        CourseFigure("8 GPUs, an hour at $2 to $4", "$16-32", f"${cost(8, 1, 2):.0f}-{cost(8, 1, 4):.0f}"),
        CourseFigure("1000 GPUs, an hour", "$2000-4000", f"${cost(1000, 1, 2):.0f}-{cost(1000, 1, 4):.0f}"),
        CourseFigure("1000 GPUs, a week", "$336K-672K", f"${low / 1e3:.0f}K-{high / 1e3:.0f}K"),
        CourseFigure(
            "90 % busy instead of 60 % costs less by",
            "50 %",
            f"{100 * (1 - busy / high):.0f} %",
            "the same work takes 60/90 of the time: a third less. 50 % more work in the same time is another question",
        ),
        CourseFigure(
            "the week of $672K then costs",
            "$403K",
            f"${busy / 1e3:.0f}K",
            f"672 * 60/90; ${(high - busy) / 1e3:.0f}K are saved. 403 is 672 * 0.6, as if the GPUs were 100 % busy",
        ),
        CourseFigure("95 % busy instead of 60 % trains more by", "58 %", f"{100 * (0.95 / 0.6 - 1):.0f} %"),
        CourseFigure("2 trillion tokens at 100,000 per second", "230+ days", f"{2e12 / 1e5 / 86400:.0f} days"),
        CourseFigure(
            "GPT-3: 10,000 GPUs for 96 days are, per GPU",
            "not said",
            f"{gpt3 / 1e12:.1f} TFLOP/s, 3 % of a V100: an unlikely pair of figures",
        ),
        CourseFigure(
            "4 GPUs, pictures per second with DDP",
            "380 and 360",
            "-",
            "two tables of the original differ; so do its 750 and 680 on 8 GPUs",
        ),
        CourseFigure(
            "A100 in fp32",
            "156 TFLOPS",
            "19.5",
            "156 is TF32, which rounds to 10 bits of precision; so fp16's 312 is 16 times fp32, and twice TF32",
        ),
        CourseFigure("naive all-reduce on 4 GPUs, sent in total", "3 D", f"{4 * 3} D", "3 D is what each GPU sends"),
        CourseFigure("ring all-reduce on 4 GPUs, sent by each", "about 2 D", f"{ring_share(4):g} D"),
    ]


def ring_share(ranks: int) -> float:
    """Return what each rank sends in a ring all-reduce, as a multiple of the data: 2 (N - 1) / N."""
    return 2 * (ranks - 1) / ranks


def table(rows: list[CourseFigure]) -> str:
    """Return the rows as text; a figure that is wrong is marked, with the reason below it."""
    width = max(len(row.what) for row in rows)
    lines = [f"  {'':{width}}  {'original':12}  here"]
    for row in rows:
        mark = "  WRONG in the original" if row.wrong else ""
        lines.append(f"  {row.what:{width}}  {row.course:12}  {row.computed}{mark}")
        if row.wrong:
            lines.append(f"  {'':{width}}  {row.wrong}")

    return "\n".join(lines)
