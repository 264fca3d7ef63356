"""The control word: what all ranks must agree on in every step, in a form that one sum over ranks carries."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class ControlWord:
    """What every rank tells every other once per step. All fields are added over ranks.

    Only numbers that are equal, or flags of which "anybody" or "everybody" matters, so one sum serves them all.
    """

    weight: float | Tensor = 0.0
    stop: int = 0
    exhausted: int = 0
    step: int = 0  # modulo 4096; equal on all ranks, or they have fallen out of step
    scale: float = 0.0  # log2 of the loss scale; equal on all ranks
    new_metrics: int = 0  # this rank has seen a metric that not all ranks know
    save: int = 0  # a checkpoint is due
    leave: int = 0  # this rank was asked to save and go
    save_failed: int = 0  # this rank's part of the checkpoint could not be written
    loss: float | Tensor = 0.0  # the sum, where somebody watches for spikes


LENGTH = 12  # of a packed word: the weight takes three places
LOSS = LENGTH - 1  # the place of the loss
LOW = 4096.0
STAGES = 4  # pinned buffers in turn: the host is never that many steps ahead of the GPU


class ControlWordCodec:
    """Words as tensors that can be added over ranks, without making the host wait for a GPU.

    An exchange may multiply by a rounded 1/N on the way, so whole numbers are rounded back. A weight travels as a
    multiple of LOW, the whole rest and the fraction: each part is exact in float32, far beyond 2**24.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype, self._turn = device, dtype, 0
        on_cuda = device.type == "cuda"
        self._stages = [torch.zeros(LENGTH, dtype=dtype, pin_memory=True) for _ in range(STAGES * on_cuda)]

    def pack(self, word: ControlWord, times: float) -> Tensor:
        """`times` the word, as a new tensor on the device."""
        weight = 0.0 if isinstance(word.weight, Tensor) else word.weight
        whole, fraction = math.floor(weight), weight % 1.0
        flags = (word.stop, word.exhausted, word.step, word.scale, word.new_metrics)
        flags += (word.save, word.leave, word.save_failed)
        loss = 0.0 if isinstance(word.loss, Tensor) else word.loss
        values = (whole - whole % LOW, whole % LOW, fraction, *flags, loss)
        packed = self._on_device([value * times for value in values])
        if isinstance(word.loss, Tensor):
            packed[LOSS] = word.loss * times
        if isinstance(word.weight, Tensor):  # still being computed by the GPU
            exact = word.weight.double()
            high, low = exact - exact.remainder(LOW), exact.floor().remainder(LOW)
            packed[:3] = torch.stack([high, low, exact.frac()]) * times
        return packed

    def unpack(self, values: list[float]) -> ControlWord:
        weight = round(values[0] / LOW) * LOW + round(values[1]) + values[2]
        if not any(values[7:LOSS]) and not (values[3] or values[4]):  # as in almost every step
            return ControlWord(weight, step=round(values[5]), scale=values[6], loss=values[LOSS])
        stop, exhausted, step = round(values[3]), round(values[4]), round(values[5])
        new_metrics, save, leave, save_failed = map(round, values[7:LOSS])
        return ControlWord(
            weight, stop, exhausted, step, values[6], new_metrics, save, leave, save_failed, values[LOSS]
        )

    def weight(self, packed: Tensor) -> Tensor:
        """The weight alone, in float64, still on the device."""
        exact = packed.double()
        return (exact[0] / LOW).round() * LOW + exact[1].round() + exact[2]

    def mean_loss(self, packed: Tensor) -> Tensor:
        return packed[LOSS] / self.weight(packed)

    def _on_device(self, values: list[float]) -> Tensor:
        if not self._stages:
            return torch.tensor(values, dtype=self.dtype)
        self._turn = (self._turn + 1) % STAGES
        stage = self._stages[self._turn]
        stage.numpy()[:] = values
        return stage.to(self.device, non_blocking=True)
