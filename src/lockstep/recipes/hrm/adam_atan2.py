"""Adam whose update is an angle: no epsilon, and no scale of the gradient, however small, changes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class AdamATan2(torch.optim.Optimizer):
    """p = p (1 - lr wd) - lr atan2(m, sqrt(v)), with m and v corrected for their start at zero."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p] = {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                self.state[p]["step"] += 1
            self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        if not params:
            return
        (beta1, beta2), lr = group["betas"], group["lr"]
        grads: list[Tensor] = [p.grad for p in params]  # pyrefly: ignore[bad-assignment]
        means = [self.state[p]["exp_avg"] for p in params]
        squares = [self.state[p]["exp_avg_sq"] for p in params]
        steps = [self.state[p]["step"] for p in params]
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        heights = torch._foreach_div(means, [1 - beta1**step for step in steps])
        lengths = torch._foreach_div(squares, [1 - beta2**step for step in steps])
        torch._foreach_sqrt_(lengths)
        angles = [torch.atan2(height, length) for height, length in zip(heights, lengths, strict=True)]
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(params, angles, alpha=-lr)
