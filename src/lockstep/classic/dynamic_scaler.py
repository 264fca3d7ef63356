"""The fp16 loss scale, for a loop of plain PyTorch: `scale`, backward, `step`, `update`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import precision
from lockstep.config import ScalerConfig
from lockstep.errors import UserError


class DynamicScaler(precision.DynamicScaler):
    """The core's scaler, and what a loop without a Stepper needs besides: finding overflows, on all ranks together."""

    def __init__(
        self,
        init_scale: float = 2.0**15,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        hysteresis: int = 1,
    ):
        super().__init__(
            ScalerConfig(
                initial=init_scale, growth=growth_factor, backoff=backoff_factor, interval=growth_interval,
                minimum=min_scale, maximum=max_scale, hysteresis=hysteresis,
            )
        )  # fmt: skip
        self._unscaled = False
        self._overflowed: bool | None = None

    def unscale(self, grads: torch.optim.Optimizer | Iterable[Tensor]) -> None:
        """Take the scale out of gradients, once a step: before clipping, or `step` does it."""
        if self._unscaled:
            raise UserError("unscale", "gradients whose scale is out already", "call it once between backward and step")
        found = _gradients(grads) if isinstance(grads, torch.optim.Optimizer) else list(grads)
        super().unscale(found)
        self._unscaled, self._overflowed = True, _agreed(any(not bool(g.isfinite().all()) for g in found), found)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """`optimizer.step()` if every gradient of every rank is finite. Whether it was."""
        if not self._unscaled:
            self.unscale(optimizer)
        if not self._overflowed:
            optimizer.step()
        return not self._overflowed

    def update(self, overflowed: bool | None = None) -> None:
        """Once per step, after `step`. All ranks move together, since all know of the overflow."""
        outcome = self._overflowed if overflowed is None else overflowed
        assert outcome is not None, "update() before step()"
        super().update(outcome)
        self._unscaled, self._overflowed = False, None


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _agreed(here: bool, like: list[Tensor]) -> bool:
    """Whether it is so on any rank."""
    if not dist.is_initialized():
        return here
    flag = torch.tensor(float(here), device=like[0].device if like else "cpu")
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)
