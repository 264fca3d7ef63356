"""Learning-rate schedules as pure functions of the optimizer step, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.config import ClipConfig, LrConfig
from lockstep.errors import UserError
from lockstep.runtime.layout import local


def factor(config: LrConfig, step: int, total: int) -> float:
    """The learning rate of optimizer step `step` (from 0) of `total`, as a share of its peak.

    Warm-up rises linearly and is above 0 at the first step; the last step of a decay reaches `min_ratio`.
    """
    if step < config.warmup:
        return (step + 1) / (config.warmup + 1)
    after, left = step - config.warmup, max(1, total - 1 - config.warmup)
    done = min(1.0, after / left)
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "linear":
        return 1.0 - (1.0 - config.min_ratio) * done
    if config.schedule == "cosine":
        return config.min_ratio + (1.0 - config.min_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))
    # wsd: warm up, stay, and decay over the last share of the run
    falling = max(1, round(total * config.decay))
    fallen = max(0, step - (total - falling)) / max(1, falling - 1)
    return 1.0 - (1.0 - config.min_ratio) * min(1.0, fallen)


def batch_scaling(config: LrConfig, global_batch: int) -> float:
    """How the peak follows the batch: a function of the global batch, never of the number of ranks."""
    if config.scaling == "none":
        return 1.0
    assert config.reference_batch is not None
    ratio = global_batch / config.reference_batch
    return ratio if config.scaling == "linear" else math.sqrt(ratio)


class LearningRate:
    """Sets the rate of every parameter group: its own peak x the batch rule x the schedule.

    `lr.peak` is the peak of the first group; the other groups keep their ratio to it.
    """

    def __init__(self, config: LrConfig, optimizers: list[torch.optim.Optimizer], total_steps: int, global_batch: int):
        self.config, self.total_steps = config, total_steps
        self.optimizers = optimizers
        own = [float(group["lr"]) for group in self.groups]
        if config.peak is not None and own[0] == 0:
            raise UserError(
                f"lr.peak={config.peak}",
                "an optimizer whose first parameter group has lr=0, so the ratio of the others to it is unknown",
                "give that group a learning rate, or leave lr.peak out",
            )
        ratio = 1.0 if config.peak is None else config.peak / own[0]
        self.peaks = [lr * ratio * batch_scaling(config, global_batch) for lr in own]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Looked up anew: loading a state replaces them."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def at(self, step: int) -> float:
        return self.peaks[0] * factor(self.config, step, self.total_steps)

    def set(self, step: int) -> float:
        share = factor(self.config, step, self.total_steps)
        for group, peak in zip(self.groups, self.peaks, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(peak * share)
            else:
                group["lr"] = peak * share
        return self.peaks[0] * share

    def landmarks(self) -> dict[str, float]:
        """What to look at before a run: most schedule mistakes show in these four numbers."""
        last = self.total_steps - 1
        points = {
            "start": 0,
            "warm-up end": min(self.config.warmup, last),
            "half": self.total_steps // 2,
            "end": last,
        }
        return {name: self.at(step) for name, step in points.items()}


@dataclass(frozen=True)
class Clipping:
    """By global norm (folded into the step's one factor), by value, or per parameter relative to its weight."""

    config: ClipConfig

    @property
    def changes_elements(self) -> bool:
        """Whether gradients must be at their true size before clipping, so nothing can be folded."""
        return self.config.value is not None or self.config.adaptive is not None

    def coefficient(self, norm: Any) -> Any:
        """Return what to multiply gradients of this norm by: a number, or a tensor on the device."""
        if self.config.norm is None:
            return 1.0
        ratio = self.config.norm / (norm + 1e-6)
        return ratio.clamp(max=1.0) if isinstance(ratio, Tensor) else min(1.0, ratio)

    def clip_elements_(
        self, parameters: list[Tensor], grads: list[Tensor], lengths_of: Callable[[list[Tensor]], list[Tensor]]
    ) -> None:
        """`lengths_of` knows tensors of which this rank holds a part only."""
        here = [local(grad) for grad in grads]
        if self.config.value is not None:
            torch._foreach_clamp_min_(here, -self.config.value)
            torch._foreach_clamp_max_(here, self.config.value)
        if self.config.adaptive is not None:
            # No gradient longer than `adaptive` times its weight; the floor lets zero weights move at all.
            for grad, weight, length in zip(here, lengths_of(parameters), lengths_of(grads), strict=True):
                limit = self.config.adaptive * weight.clamp(min=1e-3)
                grad.mul_((limit / (length + 1e-6)).clamp(max=1.0))
