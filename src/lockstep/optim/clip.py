"""Gradient clipping: by global norm, by value, or per parameter relative to the norm of its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.config import ClipConfig
from lockstep.runtime.layout import local

TINY = 1e-6  # keeps the division by a norm of zero finite
LEAST_WEIGHT_NORM = 1e-3  # that adaptive clipping assumes: a weight of zeros could never move otherwise


@dataclass(frozen=True)
class Clipping:
    """The clipping that a run has asked for: at most one of `norm`, `value` and `adaptive`.

    Clipping by norm is a factor, and is folded into the one factor of the step. The others change elements.
    """

    config: ClipConfig

    @property
    def changes_elements(self) -> bool:
        """Whether gradients must have their true size before clipping, so that nothing can be folded."""
        return self.config.value is not None or self.config.adaptive is not None

    def coefficient(self, norm: Any) -> Any:
        """Return the factor that brings a gradient of this norm below `clip.norm`.

        `norm` is a number, or a tensor of shape () on the device, which the host does not wait for.
        """
        limit = self.config.norm
        if limit is None:
            return 1.0
        ratio = limit / (norm + TINY)
        return ratio.clamp(max=1.0) if isinstance(ratio, Tensor) else min(1.0, ratio)

    def clip_elements_(
        self,
        parameters: list[Tensor],
        grads: list[Tensor],
        norms_of: Callable[[list[Tensor]], list[Tensor]],
    ) -> None:
        """Clip the gradients in place, by value or relative to their parameters.

        `norms_of` returns the norm of each full tensor, also where this rank holds only a shard of it.
        """
        shards = [local(grad) for grad in grads]
        if self.config.value is not None:
            torch._foreach_clamp_min_(shards, -self.config.value)
            torch._foreach_clamp_max_(shards, self.config.value)
        if self.config.adaptive is not None:
            for grad, weight_norm, grad_norm in zip(shards, norms_of(parameters), norms_of(grads), strict=True):
                limit = self.config.adaptive * weight_norm.clamp(min=LEAST_WEIGHT_NORM)
                grad.mul_((limit / (grad_norm + TINY)).clamp(max=1.0))
