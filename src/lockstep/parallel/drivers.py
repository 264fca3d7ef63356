"""The Driver: what the step needs from any way of executing a model. The step never asks which one it has."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor, nn

from lockstep.errors import UserError


@dataclass(slots=True)
class Word:
    """What every rank tells every other once per step. All fields are added over ranks.

    Only numbers that are equal, or flags of which "anybody" or "everybody" matters, so one sum serves them all.
    """

    weight: float | Tensor = 0.0
    stop: float = 0.0
    exhausted: float = 0.0
    step: float = 0.0  # modulo 4096; equal on all ranks, or they have fallen out of step
    scale: float = 0.0  # log2 of the loss scale; equal on all ranks

    @classmethod
    def length(cls) -> int:
        return len(fields(cls)) + 1  # the weight takes two places, see `pack`


LOW = 4096.0  # a weight travels as a multiple of LOW and a remainder: exact in float32 far beyond 2**24
STAGES = 4  # pinned buffers in turn: the host is never that many steps ahead of the GPU


class WordCodec:
    """Words as tensors that can be added over ranks, without making the host wait for a GPU."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype, self._turn = device, dtype, 0
        on_cuda = device.type == "cuda"
        self._stages = [torch.zeros(Word.length(), dtype=dtype, pin_memory=True) for _ in range(STAGES * on_cuda)]

    def pack(self, word: Word, times: float) -> Tensor:
        """`times` the word, as a new tensor on the device."""
        weight, rest = word.weight, (word.stop, word.exhausted, word.step, word.scale)
        host_weight = 0.0 if isinstance(weight, Tensor) else weight
        low = host_weight % LOW
        values = [(host_weight - low) * times, low * times, *(value * times for value in rest)]
        packed = self._on_device(values)
        if isinstance(weight, Tensor):  # still being computed by the GPU
            low = torch.remainder(weight.double(), LOW)
            packed[0] = (weight - low) * times
            packed[1] = low * times
        return packed

    def unpack(self, values: list[float]) -> Word:
        return Word(values[0] + values[1], *values[2:])

    def _on_device(self, values: list[float]) -> Tensor:
        if not self._stages:
            return torch.tensor(values, dtype=self.dtype)
        self._turn = (self._turn + 1) % STAGES
        stage = self._stages[self._turn]
        stage.numpy()[:] = values
        return stage.to(self.device, non_blocking=True)


class Driver(Protocol):
    """Runs forward and backward of this rank's micro-batches, and leaves summed gradients on `parameters`."""

    model: nn.Module  # the user's, unwrapped: it owns the names
    call: nn.Module  # what the task calls
    parameters: list[nn.Parameter]  # trainable, in the model's order
    names: list[str]
    gradient_factor: float  # what turns `.grad` after the exchange into the sum over all ranks
    codec: WordCodec

    def begin(self) -> None:
        """A step begins: no gradients yet."""

    def arm(self, last: bool) -> None:
        """Before a forward: will its backward be this step's last, the one that exchanges?"""

    def backward(self, total: Tensor, start: Tensor, word: Word | None) -> None:
        """Backpropagate `total` times `start`. On the last micro-batch `word` is given and travels along."""

    def word(self) -> Tensor:
        """The summed word of this step, packed by `codec`."""

    def sync_buffers(self) -> None:
        """Make buffers (running statistics) equal everywhere, before evaluating or saving."""


class SingleDriver:
    """One process: there is nobody to exchange with."""

    gradient_factor = 1.0

    def __init__(self, model: nn.Module, device: torch.device):
        self.model = self.call = model
        self.names, self.parameters = trainable(model)
        self.codec = WordCodec(device, torch.float64)

    def begin(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def arm(self, last: bool) -> None:
        pass

    def backward(self, total: Tensor, start: Tensor, word: Word | None) -> None:
        torch.autograd.backward(total, start)
        if word is not None:
            self._word = self.codec.pack(word, times=1.0)

    def word(self) -> Tensor:
        return self._word

    def sync_buffers(self) -> None:
        pass


def trainable(model: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    pairs = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not pairs:
        raise UserError(
            "a model to train",
            f"{type(model).__name__} has no parameter with requires_grad=True",
            "unfreeze what should be trained before Lockstep gets the model",
        )
    return [name for name, _ in pairs], [p for _, p in pairs]
