"""AdamW without a schedule: gradients are taken between the fast weights and their average, which is the result.

After Defazio et al., 2024 ("The Road Less Scheduled"). Three sequences belong to a parameter:

    z   the fast weights, which AdamW's steps move
    x   their average, which is evaluated, saved and exported
    y   between the two: the model has it while it is trained, so gradients are taken there

`eval()` puts x into the model and `train()` y again. y is computed from x and z in one way only, so a run that was
evaluated or resumed continues with the same bits. Every operation is elementwise and rounded by itself: the result is
the same however a parameter is sharded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.runtime.shards import to_local


class AdamWScheduleFree(torch.optim.Optimizer):
    """Schedule-free AdamW. Give it a constant rate, with a warm-up if you like.

    The model holds one of two points: y, at which gradients are computed (`train`), or x, the average that is evaluated
    and saved (`eval`). The caller switches between them.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "largest_lr": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]
        """Update all parameters that have a gradient. The model must hold y (`train()`)."""
        assert closure is None
        for group in self.param_groups:
            # The square of the largest rate so far is the weight of a step, so steps of the warm-up weigh less.
            group["largest_lr"] = max(group["largest_lr"], float(group["lr"]))
            weight = group["largest_lr"] ** 2

            # A parameter that is unfrozen later, or that had no gradient in some steps, has counted fewer of them.
            alike: dict[tuple[int, float], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    alike.setdefault(self._count(p, weight), []).append(p)

            for (steps, weight_sum), parameters in alike.items():
                self._update(parameters, group, steps, weight / weight_sum if weight else 0.0)

    def _count(self, p: Tensor, weight: float) -> tuple[int, float]:
        """Count a step of a parameter. Return the number of its steps, and the sum of their weights."""
        state = self.state[p]
        if not state:
            copies = {name: p.detach().clone() for name in ("z", "x")}
            state.update(copies, exp_avg_sq=torch.zeros_like(p), steps=0, weight_sum=0.0)

        state["steps"] += 1
        state["weight_sum"] += weight
        return state["steps"], state["weight_sum"]

    def _update(self, parameters: list[Tensor], group: dict[str, Any], steps: int, share: float) -> None:
        """Move z by AdamW's step number `steps`, and x towards z by `share`."""
        rate, beta2 = float(group["lr"]), group["betas"][1]
        grads = [to_local(p.grad) for p in parameters]  # pyrefly: ignore[bad-argument-type]
        squares, fast, average = (self._states(parameters, name) for name in ("exp_avg_sq", "z", "x"))

        # Not `lerp` or `alpha`: they may use a fused multiply-add for some elements and not for others.
        torch._foreach_mul_(squares, beta2)
        torch._foreach_add_(squares, torch._foreach_mul(torch._foreach_mul(grads, grads), 1 - beta2))

        # AdamW's own step, without momentum: y takes its place.
        divisors = torch._foreach_div(squares, 1 - beta2**steps)
        torch._foreach_sqrt_(divisors)
        torch._foreach_add_(divisors, group["eps"])
        moves = torch._foreach_div(grads, divisors)
        if group["weight_decay"]:
            weights = [to_local(p).detach() for p in parameters]
            torch._foreach_add_(moves, torch._foreach_mul(weights, group["weight_decay"]))

        # z takes the step, and x follows it by its share.
        torch._foreach_mul_(moves, -rate)
        torch._foreach_add_(fast, moves)
        torch._foreach_mul_(average, 1 - share)
        torch._foreach_add_(average, torch._foreach_mul(fast, share))
        self._put_training_weights(parameters, group)

    def _states(self, parameters: list[Tensor], name: str) -> list[Tensor]:
        return [to_local(self.state[p][name]) for p in parameters]

    def _put_training_weights(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Put y into the model: x and z, mixed by beta1."""
        beta1 = group["betas"][0]
        weights = torch._foreach_mul(self._states(parameters, "x"), beta1)
        torch._foreach_add_(weights, torch._foreach_mul(self._states(parameters, "z"), 1 - beta1))
        torch._foreach_copy_([to_local(p).detach() for p in parameters], weights)

    @torch.no_grad()
    def train(self) -> None:
        """Put y into the parameters: the weights to train with."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if self.state.get(p)]
            if parameters:
                self._put_training_weights(parameters, group)

    @torch.no_grad()
    def eval(self) -> None:
        """Put x into the parameters: the weights to evaluate and to save."""
        parameters = [p for group in self.param_groups for p in group["params"] if self.state.get(p)]
        if parameters:
            torch._foreach_copy_([to_local(p).detach() for p in parameters], self._states(parameters, "x"))
