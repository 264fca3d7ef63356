"""The control word: the state that ranks exchange in every step, as numbers that one all-reduce can sum.

All decisions that must be the same on all ranks are part of it: stop, save, preemption, end of data, a failed save.
Drivers send the packed word along with the gradients or their norms. Only `ddp.hook=fp16` or `bf16` and
`ddp.find_unused_parameters` need a separate collective for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import cycle
from operator import attrgetter

import numpy as np
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
    loaded: int = 0  # this rank has loaded a checkpoint since its last step


@dataclass(slots=True, kw_only=True)
class ControlWord(Flags):
    """One rank's contribution to a step, or the sum over all ranks."""

    weight: float | Tensor = 0.0
    step: int = 0  # `step_mark` of the step; if the sum is not world size x mark, the ranks are out of step
    scale: float = 0.0  # log2 of the loss scale; equal on all ranks
    loss: float | Tensor = 0.0  # the sum of the loss, if spike detection is on


STEP_MODULUS = 4096  # step numbers are compared modulo this, so that float32 carries their sum exactly

# Layout of a packed word: the weight takes three slots; step, scale and each flag take one; the last is the loss.
FLAGS = tuple(flag.name for flag in fields(Flags))
LENGTH = 6 + len(FLAGS)
LOSS = LENGTH - 1
STEP, SCALE = 3, 4
FLAG_SLOTS = slice(5, LOSS)

LOW = 4096.0  # a weight is split into a multiple of this, the remainder, and the fraction
PINNED_BUFFERS = 4  # used in turn; the host never runs this many steps ahead of the GPU

_read_flags = attrgetter(*FLAGS)


def step_mark(step: int) -> int:
    """Return the number that stands for a step in a control word: 1 to STEP_MODULUS.

    It is never 0, so that a missing or doubled word changes the sum even in step 0.
    """
    return step % STEP_MODULUS + 1


class ControlWordCodec:
    """Packs control words into tensors that can be summed over ranks, without making the host wait for a GPU.

    An all-reduce may multiply by a rounded 1/N on the way, so integers are rounded back. A weight travels as three
    numbers, a multiple of LOW, the integer remainder and the fraction, so that it is exact in float32 far beyond 2**24.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device = device
        self.dtype = dtype
        self._numpy_dtype = torch.empty(0, dtype=dtype).numpy().dtype
        count = PINNED_BUFFERS if device.type == "cuda" else 0
        self._pinned = cycle([torch.zeros(LENGTH, dtype=dtype, pin_memory=True) for _ in range(count)])

    def pack(self, word: ControlWord, factor: float = 1.0) -> Tensor:
        """Return the word multiplied by `factor`, as a new tensor [LENGTH] on the device."""
        weight = 0.0 if isinstance(word.weight, Tensor) else word.weight
        loss = 0.0 if isinstance(word.loss, Tensor) else word.loss

        integer = math.floor(weight)
        values = (integer - integer % LOW, integer % LOW, weight % 1.0, word.step, word.scale, *_read_flags(word), loss)
        packed = self._to_device([value * factor for value in values])

        # Numbers that the GPU is still computing are filled in there.
        if isinstance(word.loss, Tensor):
            packed[LOSS] = word.loss * factor

        if isinstance(word.weight, Tensor):
            exact = word.weight.double()
            packed[:3] = (
                torch.stack([exact - exact.remainder(LOW), exact.floor().remainder(LOW), exact.frac()]) * factor
            )

        return packed

    def unpack(self, values: list[float]) -> ControlWord:
        """Read the sum over ranks back from its `LENGTH` values."""
        # Whole numbers that were multiplied by 1/N are rounded, to remove the error.
        weight = round(values[0] / LOW) * LOW + round(values[1]) + values[2]
        word = ControlWord(weight=weight, step=round(values[STEP]), scale=values[SCALE], loss=values[LOSS])

        # This runs in every step, and in almost every step no flag is set.
        if any(values[FLAG_SLOTS]):
            for name, count in zip(FLAGS, values[FLAG_SLOTS], strict=True):
                setattr(word, name, round(count))

        return word

    def weight(self, packed: Tensor) -> Tensor:
        """Return the weight alone, in float64, still on the device."""
        exact = packed.double()
        return (exact[0] / LOW).round() * LOW + exact[1].round() + exact[2]

    def mean_loss(self, packed: Tensor) -> Tensor:
        """Return loss / weight, still on the device."""
        return packed[LOSS] / self.weight(packed)

    def _to_device(self, values: list[float]) -> Tensor:
        # Through numpy: torch.tensor takes several times as long for a list.
        if self.device.type != "cuda":
            return torch.from_numpy(np.array(values, self._numpy_dtype))

        # From pinned memory the copy is asynchronous, so a buffer must not be written again before it has been read.
        buffer = next(self._pinned)
        buffer.numpy()[:] = values

        return buffer.to(self.device, non_blocking=True)
