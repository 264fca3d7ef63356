"""The update at the end of a step: multiply gradients by one factor, clip them, and step the optimizers.

Clipping by global norm is part of that factor. Clipping by value, or relative to the norm of a parameter (adaptive), is
separate: it needs gradients at their true size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import ClipConfig
from lockstep.optim.optimizers import Optimizers
from lockstep.runtime.layout import local

TINY = 1e-6  # keeps the division by a norm of zero finite
MIN_PARAMETER_NORM = 1e-3  # for adaptive clipping, so that parameters of zero can still change

# Returns the norm of each full tensor, even if this rank holds only a shard of it.
Norms = Callable[[list[Tensor]], list[Tensor]]


class Update:
    """Multiplies gradients by the step's factor, clips elements if configured, and steps the optimizers.

    The factor contains everything that divides: the weight of the step, the loss scale and the clipping by norm. It is
    applied once, inside the optimizer's kernel if that can do it.
    """

    def __init__(self, optimizers: Optimizers, clip: ClipConfig, replicated: bool, norms: Norms, device: torch.device):
        """`replicated`: gradients are full tensors on every rank, not shards."""
        self._before_next: Callable[[], None] | None = None
        self.optimizer_indices = range(len(optimizers.all))

        self._optimizers = optimizers
        self._clip = clip
        self._replicated = replicated
        self._norms = norms
        self._divisor = torch.ones((), device=device)  # the inverse of a step's factor
        self._clips_elements = clip.value is not None or clip.adaptive is not None

        # Fused optimizers can apply the factor inside their kernel. They need full gradients (or float32 masters, which
        # get copies), and no elementwise clipping, which needs gradients that are already divided.
        full_gradients = replicated or optimizers.masters is not None
        self._fused = optimizers.divides_gradients and full_gradients and not self._clips_elements
        self.skips_on_device = replicated and self._fused and optimizers.skips_on_device

    def run_before_next(self, callback: Callable[[], None]) -> None:
        """Run `callback` once, before the next update: a save may still be copying the optimizers' state."""
        self._before_next = callback

    def wait_for_copy(self) -> None:
        """Wait until a save has copied what it copies while training continues. Every update begins with this."""
        if self._before_next is not None:
            self._before_next()
            self._before_next = None

    def clip_factor(self, norm: Any) -> Any:
        """Return the factor that brings a gradient of this norm down to `clip.norm`; at most 1.

        `norm` is a number, or a tensor of shape () on the device. The host does not wait for the device.
        """
        if self._clip.norm is None:
            return 1.0

        ratio = self._clip.norm / (norm + TINY)
        return ratio.clamp(max=1.0) if isinstance(ratio, Tensor) else min(1.0, ratio)

    def step(self, parameters: list[nn.Parameter], factor: float, update_count: int, indices: Sequence[int]) -> None:
        """Apply a step that the host accepted.

        `update_count` counts the updates of the run, including skipped ones. `indices` holds the indices of the
        optimizers to step.
        """
        self.wait_for_copy()
        if self._fused:
            # The optimizers divide, hence the inverse.
            self._optimizers.step(update_count, indices, self._divisor.fill_(1.0 / factor))
            return

        # A pipeline stage may have no trainable parameters.
        if parameters:
            grads = self.multiply(parameters, factor)
            if self._clips_elements:
                clip_elements_([p.detach() for p in parameters], grads, self._clip, self._norms)

        self._optimizers.step(update_count, indices)

    def step_on_device(self, factor: Tensor, skip: Tensor, update_count: int, indices: Sequence[int]) -> None:
        """Apply the step unless `skip` is true on the device. The other arguments are as in `step`."""
        self.wait_for_copy()
        self._optimizers.step(update_count, indices, (1.0 / factor).float(), skip.float())

    def multiply(self, parameters: list[nn.Parameter], factor: float) -> list[Tensor]:
        """Multiply the gradients in place by a factor, and return them."""
        grads: list[Tensor] = [p.grad for p in parameters]  # pyrefly: ignore[bad-assignment]
        torch._foreach_mul_(grads if self._replicated else [local(grad) for grad in grads], factor)
        return grads


def clip_elements_(parameters: list[Tensor], grads: list[Tensor], clip: ClipConfig, norms: Norms) -> None:
    """Clip the gradients in place, by value or relative to the norms of their parameters."""
    shards = [local(grad) for grad in grads]
    if clip.value is not None:
        torch._foreach_clamp_min_(shards, -clip.value)
        torch._foreach_clamp_max_(shards, clip.value)

    # The norm of a gradient is limited to a fraction of the norm of its parameter, both over full tensors.
    if clip.adaptive is not None:
        for grad, parameter_norm, grad_norm in zip(shards, norms(parameters), norms(grads), strict=True):
            limit = clip.adaptive * parameter_norm.clamp(min=MIN_PARAMETER_NORM)
            grad.mul_((limit / (grad_norm + TINY)).clamp(max=1.0))
