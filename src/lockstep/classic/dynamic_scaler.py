"""The fp16 loss scale, for a loop of plain PyTorch: `scale`, backward, `step`, `update`.

It behaves like torch's GradScaler in a single process, and decides the same on all ranks: an overflow on one rank skips
the step everywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from lockstep import precision
from lockstep.config import ScalerConfig
from lockstep.errors import UserError


class DynamicScaler(precision.DynamicScaler):
    """The engine's scaler for a loop without a Stepper: it looks for overflows itself, on all ranks."""

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
                initial=init_scale,
                growth=growth_factor,
                backoff=backoff_factor,
                interval=growth_interval,
                minimum=min_scale,
                maximum=max_scale,
                hysteresis=hysteresis,
            )
        )

        # Whether any rank overflowed in this step; None before `unscale`.
        self._overflowed: bool | None = None
        self.history: deque[tuple[float, bool]] = deque(maxlen=100)  # (scale, overflowed) of recent steps

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.value

    def unscale(self, grads: torch.optim.Optimizer | Iterable[torch.Tensor]) -> None:
        """Take the scale out of the gradients, once a step: call it before clipping, or `step` does it.

        Collective: every rank must call it.
        """
        if self._overflowed is not None:
            raise UserError("unscale() was called twice in one step", "", "call it once between backward and step")

        if isinstance(grads, torch.optim.Optimizer):
            parameters = [p for group in grads.param_groups for p in group["params"]]
            grads = [p.grad for p in parameters if p.grad is not None]

        grads = list(grads)
        torch._foreach_mul_(grads, 1.0 / self.value)

        # The host waits for the device here, as GradScaler does.
        overflowed = not all(bool(grad.isfinite().all()) for grad in grads)
        # An overflow on one rank skips the step on all.
        if dist.is_initialized():
            flag = torch.tensor(float(overflowed), device=grads[0].device if grads else "cpu")
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            overflowed = bool(flag)

        self._overflowed = overflowed

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step the optimizer if every gradient of every rank is finite. Return whether it was."""
        if self._overflowed is None:
            self.unscale(optimizer)

        if not self._overflowed:
            optimizer.step()

        return not self._overflowed

    def update(self, overflowed: bool | None = None) -> None:
        """Adjust the scale, once a step and after `step`. All ranks know of the overflow, so they move together."""
        # A loop that looks for overflows itself passes the outcome.
        outcome = self._overflowed if overflowed is None else overflowed
        assert outcome is not None, "update() before step()"
        self.history.append((self.value, outcome))
        super().update(outcome)
        self._overflowed = None

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"history": [list(entry) for entry in self.history]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.history.clear()
        self.history.extend((float(scale), bool(overflowed)) for scale, overflowed in state["history"])
