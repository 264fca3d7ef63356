"""The control word: the state that ranks exchange in every step, as numbers that one all-reduce can sum.

All decisions that must be the same on all ranks are part of it: stop, save, preemption, end of data, a failed save.
Drivers send the packed word along with the gradients or their norms. Only `ddp.hook=fp16` or `bf16`,
`ddp.find_unused_parameters`, and DDP on a number of ranks whose mean could round (`mean_is_exact`) need a separate
collective for it.

Every integer is exact, on up to MOST_RANKS ranks and whatever the order of the additions: no rank sends an integer
above BASE, so no sum is above MOST_RANKS x BASE = 2^24, and float32 has all integers up to there. Only the first digit
of a weight may be larger than BASE. It is exact as long as its sum is at most 2^24.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, fields
from itertools import cycle
from operator import attrgetter

import torch
from torch import Tensor


@dataclass(slots=True)
class Flags:
    """On one rank each flag is 0 or 1. Summed over ranks, it is the number of ranks that have set it."""

    stop: int = 0  # end the loop
    exhausted: int = 0  # this rank's stream has ended
    new_metrics: int = 0  # this rank has a metric that other ranks may not have yet
    save: int = 0  # a checkpoint is due
    preempt: int = 0  # this rank received a preemption signal
    save_failed: int = 0  # this rank could not write its file of the checkpoint
    evaluate: int = 0  # an evaluation is due by rank 0's clock
    loaded: int = 0  # this rank has loaded a checkpoint since its last step


@dataclass(slots=True, kw_only=True)
class ControlWord(Flags):
    """What one rank contributes to a step."""

    weight: float | Tensor = 0.0
    step: int = 0  # `step_mark` of the step
    scale: float = 0.0  # log2 of the loss scale
    loss: float | Tensor = 0.0  # the sum of the loss, if something reads it: spike detection, or a hook


@dataclass(slots=True, kw_only=True)
class SummedWord(Flags):
    """The sum of the control words of all ranks, as the host reads it."""

    weight: float = 0.0  # of the whole step
    steps: int = 0  # world size x mark of the step, unless the ranks are out of step
    scales: float = 0.0  # world size x log2 of the loss scale, which is equal on all ranks
    loss: float = 0.0  # of the whole step; 0 if nothing reads it


BASE = 1024  # of the digits of a weight; step numbers are compared modulo this as well
MOST_RANKS = 2**24 // BASE  # float32 carries the sum of the words of this many ranks exactly
MOST_RANKS_OF_MEAN = 128  # see `mean_is_exact`

# Layout of a packed word. The weight takes four slots: three digits, of which the first may be larger than BASE, and
# the fraction. Step, scale and each flag take one. The last is the loss.
FLAGS = tuple(flag.name for flag in fields(Flags))
LENGTH = 7 + len(FLAGS)
LOSS = LENGTH - 1
WEIGHT, DIGITS, FRACTION = slice(0, 4), slice(0, 3), 3
STEP, SCALE = 4, 5
FLAG_SLOTS = slice(6, LOSS)

PINNED_BUFFERS = 4  # used in turn; the host never runs this many steps ahead of the GPU

_read_flags = attrgetter(*FLAGS)


def step_mark(step: int) -> int:
    """Return the number that stands for a step in a control word: 1 to BASE.

    It is never 0, so that a missing or doubled word changes the sum even in step 0.
    """
    return step % BASE + 1


def mean_is_exact(ranks: int) -> bool:
    """Return whether integers survive in float32 if DDP takes the mean of words that were multiplied by `ranks`.

    DDP multiplies each word by 1/ranks, rounded, before it adds. If `ranks` is a power of two, neither rounds.
    Otherwise each product is off by up to 2^-23 of itself, and each addition rounds by half a unit in the last place of
    a partial sum, which for i words is BASE x i at most: by 2^(floor(log2(BASE x i)) - 24). In the worst order of
    additions, one rank after the other, this adds up to 0.35 on 127 ranks. From 147 ranks on it adds up to more than
    0.5, so that rounding could return another integer.
    """
    is_power_of_two = ranks & (ranks - 1) == 0
    return ranks <= MOST_RANKS if is_power_of_two else ranks <= MOST_RANKS_OF_MEAN


class ControlWordCodec:
    """Packs control words into tensors that can be summed over ranks, without making the host wait for a GPU.

    An all-reduce may multiply by a rounded 1/N on the way, so integers are rounded back. A weight travels as digits of
    base BASE, so that the sum of integer weights is exact in float32 up to 2^44.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device = device
        self.dtype = dtype
        self._typecode = {torch.float32: "f", torch.float64: "d"}[dtype]
        count = PINNED_BUFFERS if device.type == "cuda" else 0
        self._pinned = cycle([torch.zeros(LENGTH, dtype=dtype, pin_memory=True) for _ in range(count)])

        # With these, a weight on the device becomes its digits and its fraction: (weight / divisors) modulo moduli.
        self._divisors = torch.tensor([BASE**2, BASE, 1, 1], dtype=torch.float64, device=device)
        self._moduli = torch.tensor([math.inf, BASE, BASE, 1], dtype=torch.float64, device=device)

    def pack(self, word: ControlWord, factor: float = 1.0) -> Tensor:
        """Return the word multiplied by `factor`, as a new tensor [LENGTH] on the device."""
        weight = 0.0 if isinstance(word.weight, Tensor) else word.weight
        loss = 0.0 if isinstance(word.loss, Tensor) else word.loss

        integer = math.floor(weight)
        high, remainder = divmod(integer, BASE**2)
        digits = (high, remainder // BASE, remainder % BASE, weight - integer)
        values = (*digits, word.step, word.scale, *_read_flags(word), loss)
        packed = self._to_device([value * factor for value in values])

        # Numbers that the GPU is still computing are filled in there.
        if isinstance(word.loss, Tensor):
            packed[LOSS] = word.loss * factor

        if isinstance(word.weight, Tensor):
            parts = (word.weight.double() / self._divisors).fmod_(self._moduli)
            parts[DIGITS].trunc_()
            packed[WEIGHT] = parts.mul_(factor)

        return packed

    def unpack(self, values: list[float]) -> SummedWord:
        """Read the sum over ranks from its `LENGTH` values."""
        # Whole numbers that were multiplied by 1/N are rounded, to remove the error. A weight that a GPU has computed
        # may not be finite. Step and flags are finite unless another tensor came in place of the word: -1 stands for no
        # step, and the flags then count for nothing.
        high, middle, low, fraction = values[WEIGHT]
        weight = math.nan
        if math.isfinite(high + middle + low + fraction):
            weight = float((round(high) * BASE + round(middle)) * BASE + round(low)) + fraction

        steps = round(values[STEP]) if math.isfinite(values[STEP]) else -1
        word = SummedWord(weight=weight, steps=steps, scales=values[SCALE], loss=values[LOSS])

        # This runs in every step, and in almost every step no flag is set.
        if any(values[FLAG_SLOTS]):
            for name, count in zip(FLAGS, values[FLAG_SLOTS], strict=True):
                setattr(word, name, round(count) if math.isfinite(count) else 0)

        return word

    def weight(self, packed: Tensor) -> Tensor:
        """Return the weight alone, in float64, still on the device."""
        exact = packed[WEIGHT].double()
        high, middle, low, _ = exact.round().unbind()
        return torch.add(middle, high, alpha=BASE).mul_(BASE).add_(low).add_(exact[FRACTION])

    def mean_loss(self, packed: Tensor) -> Tensor:
        """Return loss / weight, still on the device."""
        return packed[LOSS] / self.weight(packed)

    def _to_device(self, values: list[float]) -> Tensor:
        # Not torch.tensor, which takes several times as long for a list.
        if self.device.type != "cuda":
            return torch.frombuffer(array(self._typecode, values), dtype=self.dtype)

        # From pinned memory the copy is asynchronous, so a buffer must not be written again before it has been read.
        buffer = next(self._pinned)
        buffer.numpy()[:] = values

        return buffer.to(self.device, non_blocking=True)
