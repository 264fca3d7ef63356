"""The Driver: what the step needs from any way of executing a model. The step never asks which one it has."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.parallel.word import Word, WordCodec


class Driver(Protocol):
    """Runs forward and backward of this rank's micro-batches, and leaves summed gradients on `parameters`."""

    model: nn.Module  # the user's, unwrapped: it owns the names
    call: nn.Module  # what the task calls
    parameters: list[nn.Parameter]  # trainable, in the model's order
    names: list[str]
    gradient_factor: float  # what turns `.grad` after the exchange into the sum over all ranks
    codec: WordCodec
    in_step: bool  # a forward waits for the other ranks: all must run equally many
    replicated: bool  # every rank holds every parameter whole

    def begin(self) -> None:
        """A step begins: no gradients yet."""

    def arm(self, last: bool) -> None:
        """Before a forward: will its backward be this step's last, the one that exchanges?"""

    def backward(self, total: Tensor, start: Tensor, word: Word | None) -> None:
        """Backpropagate `total` times `start`. On the last micro-batch `word` is given and travels along."""

    def word(self) -> Tensor:
        """The summed word of this step, packed by `codec`."""

    def norms(self, grads: list[Tensor]) -> Tensor:
        """The lengths of this step's gradients as a whole, in their order, the same bits on every rank."""

    def lengths(self, tensors: list[Tensor]) -> list[Tensor]:
        """Of tensors that are laid out like the parameters."""

    def sync_buffers(self) -> None:
        """Make buffers (running statistics) equal everywhere, before evaluating or saving."""


class SingleDriver:
    """One process: there is nobody to exchange with."""

    gradient_factor = 1.0
    in_step, replicated = False, True

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

    def norms(self, grads: list[Tensor]) -> Tensor:
        return torch.stack(self.lengths(grads))

    def lengths(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(torch._foreach_norm(tensors))

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
