"""A moving average of the weights, which evaluates better than the weights themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class MovingAverage:
    """`rate` of itself and the rest of the weights, in every step. At first it forgets faster, so that in step n it
    covers about the last n / 9 steps, and nothing is left of weights that have learned nothing yet."""

    def __init__(self, rate: float):
        self.rate = rate
        self.weights: dict[str, Tensor] = {}

    @torch.no_grad()
    def follow(self, model: nn.Module, step: int) -> None:
        """After step `step`, counted from 1. It begins with the weights of the first."""
        now = {name: p.detach() for name, p in model.named_parameters()}
        if not self.weights:
            self.weights = {name: p.clone() for name, p in now.items()}
            return
        self._move_to(next(iter(now.values())).device)
        rate = min(self.rate, (1 + step) / (10 + step))
        torch._foreach_lerp_([self.weights[name] for name in now], list(now.values()), 1 - rate)

    @contextmanager
    def instead(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has the average's values; it is the same object, compiled or not."""
        if not self.weights:  # nothing was trained yet
            yield
            return
        params = {name: p.data for name, p in model.named_parameters()}
        self._move_to(next(iter(params.values())).device)
        own = [p.clone() for p in params.values()]
        torch._foreach_copy_(list(params.values()), [self.weights[name] for name in params])
        try:
            yield
        finally:
            torch._foreach_copy_(list(params.values()), own)

    def _move_to(self, device: torch.device) -> None:
        """A checkpoint may come from another kind of machine."""
        self.weights = {name: value.to(device) for name, value in self.weights.items()}
