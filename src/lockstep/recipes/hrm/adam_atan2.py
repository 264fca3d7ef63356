"""Adam whose update is an angle: no epsilon, and no scale of the gradient, however small, changes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


class AdamATan2(torch.optim.Optimizer):
    """p = p (1 - lr wd) - lr atan2(m, sqrt(v)), with m and v corrected for their start at zero.

    `fused` is for a GPU (and what it does there by default): one kernel for each parameter, or, where there is no
    Triton, some twenty for all. It divides by `grad_scale` and skips by `found_inf`, both tensors, so that the host
    waits for nothing; and it counts the steps of all parameters of a group together.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        fused: bool | None = None,
    ):
        params = list(params)
        fused = all(p.is_cuda for p in params) if fused is None else fused
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "fused": fused})

    @property
    def divides_and_skips(self) -> bool:
        return all(group["fused"] for group in self.param_groups)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p] = {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            if params:
                (self._update_at_once if group["fused"] else self._update)(group, params)

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        grads, means, squares = self._held(params)
        steps = [int(self.state[p]["step"]) + 1 for p in params]
        for p, step in zip(params, steps, strict=True):
            self.state[p]["step"] = step
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        heights = torch._foreach_div(means, [1 - beta1**step for step in steps])
        lengths = torch._foreach_div(squares, [1 - beta2**step for step in steps])
        torch._foreach_sqrt_(lengths)
        angles = [torch.atan2(height, length) for height, length in zip(heights, lengths, strict=True)]
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(params, angles, alpha=-lr)

    def _update_at_once(self, group: dict[str, Any], params: list[Tensor]) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        grads, means, squares = self._held(params)
        count = self._count(params)
        applies = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        count += applies
        correction = ((1 - beta2**count).sqrt() / (1 - beta1**count)).nan_to_num_()  # 0 / 0 if the first one is skipped
        if kernel := _kernel() if all(map(_suits_kernel, (*params, *grads))) else None:
            divisor = self.grad_scale if self.grad_scale is not None else torch.ones_like(count)
            skip = self.found_inf if self.found_inf is not None else torch.zeros_like(count)
            decay = group["weight_decay"]
            kernel(params, grads, means, squares, correction, divisor, skip, lr, beta1, beta2, decay)
            return
        # torch's kernel moves both moments, divides, and skips. At a rate of 0 it leaves the parameters alone.
        torch._fused_adam_(
            params, grads, means, squares, [], [count] * len(params),
            lr=0.0, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=1.0, amsgrad=False, maximize=False,
            grad_scale=self.grad_scale, found_inf=self.found_inf,
        )  # fmt: skip
        heights, lengths = (torch.cat([moment.flatten() for moment in moments]) for moments in (means, squares))
        angles = torch.atan2(heights.mul_(correction), lengths.sqrt_()).mul_(lr * applies)
        parts = [part.view_as(p) for part, p in zip(angles.split([p.numel() for p in params]), params, strict=True)]
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"] * applies)
        torch._foreach_sub_(params, parts)

    def _held(self, params: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Gradients and both moments."""
        grads: list[Tensor] = [p.grad for p in params]  # pyrefly: ignore[bad-assignment]
        return grads, [self.state[p]["exp_avg"] for p in params], [self.state[p]["exp_avg_sq"] for p in params]

    def _count(self, params: list[Tensor]) -> Tensor:
        """The steps so far: one tensor that all share. A checkpoint gives each its own, or a number."""
        first = self.state[params[0]]
        if not isinstance(first["step"], Tensor):
            first["step"] = torch.tensor(float(first["step"]), device=params[0].device)
        for p in params:
            self.state[p]["step"] = first["step"]
        return first["step"]


def _suits_kernel(tensor: Tensor) -> bool:
    """Whole, and in one piece of memory."""
    held = tensor.is_cuda and tensor.dtype == torch.float32 and tensor.is_contiguous()
    return held and not hasattr(tensor, "placements")


@cache
def _kernel() -> Callable[..., None] | None:
    if not find_spec("triton"):
        return None
    from lockstep.recipes.hrm.adam_atan2_kernel import update_

    return update_
