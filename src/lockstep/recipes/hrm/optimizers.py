"""The optimizers of HRM: Adam-atan2 for the weights, SignSGD for the puzzle vectors; and an average of the weights.

None of them makes the host wait for the device in a step on one GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.recipes.hrm.carry import gather_rows

Tensors = list[Tensor]


class AdamATan2(torch.optim.Optimizer):
    """Adam whose update is an angle: p = p (1 - lr wd) - lr atan2(m, sqrt(v)), with bias-corrected m and v.

    It has no epsilon, and scaling the gradient, however much, does not change it.

    `fused` is for a GPU, and the default there: about twenty kernels for all parameters together. It divides by
    `grad_scale` and skips by `found_inf`, both tensors, so that the host waits for nothing. It counts the steps of all
    parameters of a group together.
    """

    works_on_shards = True
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
        if fused is None:
            fused = all(p.is_cuda for p in params)

        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "fused": fused})

    @property
    def divides_and_skips(self) -> bool:
        """Whether `step` itself applies `grad_scale` and `found_inf`."""
        return all(group["fused"] for group in self.param_groups)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue

            # State is made in the first step in which a parameter has a gradient.
            for p in params:
                if not self.state[p]:
                    self.state[p] = {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

            means = [self.state[p]["exp_avg"] for p in params]
            squares = [self.state[p]["exp_avg_sq"] for p in params]
            update = self._update_fused if group["fused"] else self._update
            update(group, params, [p.grad for p in params], means, squares)

    def _update(self, group: dict[str, Any], params: Tensors, grads: Tensors, means: Tensors, squares: Tensors) -> None:
        beta1, beta2 = group["betas"]

        # A parameter without a gradient does not count its step.
        steps = [int(self.state[p]["step"]) + 1 for p in params]
        for p, step in zip(params, steps, strict=True):
            self.state[p]["step"] = step

        # Both moments are moved for all parameters at once.
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)

        # Both moments start at zero: the divisions correct for that.
        heights = torch._foreach_div(means, [1 - beta1**step for step in steps])
        widths = torch._foreach_div(squares, [1 - beta2**step for step in steps])
        torch._foreach_sqrt_(widths)
        angles = [torch.atan2(height, width) for height, width in zip(heights, widths, strict=True)]

        # Decoupled weight decay, then the step.
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, angles, alpha=-group["lr"])

    def _update_fused(
        self, group: dict[str, Any], params: Tensors, grads: Tensors, means: Tensors, squares: Tensors
    ) -> None:
        lr = group["lr"]
        decay = group["weight_decay"]
        beta1, beta2 = group["betas"]

        # A skipped step does not count. The correction is 0 / 0 if the very first step is skipped.
        applies = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        count = self._shared_step_count(params)
        count += applies
        correction = ((1 - beta2**count).sqrt() / (1 - beta1**count)).nan_to_num_()

        # torch's kernel moves both moments, divides and skips. With a rate of 0 it leaves the parameters alone.
        torch._fused_adam_(
            params, grads, means, squares, [], [count] * len(params),
            lr=0.0, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=1.0, amsgrad=False, maximize=False,
            grad_scale=self.grad_scale, found_inf=self.found_inf,
        )  # fmt: skip

        # One atan2 over all parameters: each launch of a kernel costs more than its work.
        heights = torch.cat([mean.flatten() for mean in means])
        widths = torch.cat([square.flatten() for square in squares])
        angles = torch.atan2(heights.mul_(correction), widths.sqrt_()).mul_(lr * applies)

        sizes = [p.numel() for p in params]
        changes = [angle.view_as(p) for angle, p in zip(angles.split(sizes), params, strict=True)]
        torch._foreach_mul_(params, 1 - lr * decay * applies)
        torch._foreach_sub_(params, changes)

    def _shared_step_count(self, params: list[Tensor]) -> Tensor:
        """Return the number of steps so far, as one tensor that all parameters share.

        A checkpoint gives each parameter a tensor of its own, or a plain number.
        """
        first = self.state[params[0]]
        if not isinstance(first["step"], Tensor):
            first["step"] = torch.tensor(float(first["step"]), device=params[0].device)

        for p in params:
            self.state[p]["step"] = first["step"]

        return first["step"]


class CastedSparseEmbeddingSignSGD_Distributed(torch.optim.Optimizer):
    """SignSGD with decoupled decay, on the rows of a table that the step used: row (1 - lr wd) - lr sign(sum).

    A step uses a few rows of a table that may have a million, so only their gradients travel: (slot, id, gradient) is
    gathered from all ranks and added per id, and then the sign is taken, once. If each rank took the sign first, a row
    that two ranks use would move twice.

    The result does not depend on which rank computed which gradient, not even in its bits: gradients are put in the
    order of their slots in the global batch before they are added.
    """

    divides_and_skips = True  # a sign does not depend on the divisor, as long as it is positive
    found_inf: Tensor | None = None

    def __init__(self, tables: Iterable[Tensor], lr: float, weight_decay: float, world_size: int):
        (self.table,) = tables
        self.world_size = world_size
        self._used: list[tuple[int, Tensor, Tensor]] = []  # (first slot, ids, rows)
        # The table is not a parameter, so that the engine does not all-reduce, clip or save it as one.
        super().__init__([{"params": []}], {"lr": lr, "weight_decay": weight_decay})

    def note(self, first: int, ids: Tensor, rows: Tensor) -> None:
        """Record that the step uses `rows` (B, W) of `ids` (B,) in the slots of the global batch from `first` on."""
        self._used.append((first, ids.long(), rows))

    def forget(self) -> None:
        self._used = []

    def get_active_indices(self) -> Tensor:
        return torch.cat([ids for _, ids, _ in self._used]).unique()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        ids = torch.cat([ids for _, ids, _ in self._used])
        gradients = torch.cat([rows.grad for _, _, rows in self._used if rows.grad is not None])

        # A single process runs through its slots in their order already.
        if self.world_size > 1:
            slots = torch.cat([first + torch.arange(len(i), device=i.device) for first, i, _ in self._used])
            slots, ids, gradients = gather_rows([slots, ids, gradients], self.world_size)
            order = slots.argsort()
            ids = ids[order]
            gradients = gradients[order]

        # `gradients` (N, W) of `ids` (N,), which may repeat. All shapes follow from N, so the host need not ask the
        # device how many different ids there are.
        group = self.param_groups[0]
        same = ids[:, None] == ids[None, :]
        first = same.to(torch.uint8).argmax(dim=1)  # where an id occurs first: equal ids get equal bits
        total = (same.double() @ gradients.double())[first]

        # Rows of equal ids are written several times, with equal bits.
        rows = self.table[ids]
        moved = rows * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * total.sign().to(self.table.dtype)
        if self.found_inf is not None:
            moved = torch.where(self.found_inf > 0, rows, moved)

        self.table[ids] = moved


@dataclass
class MovingAverage:
    """An exponential moving average of the weights, which evaluates better than the weights themselves.

    Each step keeps the share `rate` of the average. In step n it keeps less at first, so that the average covers about
    the last n / 9 steps, and nothing remains of weights that have learned nothing yet.
    """

    rate: float
    weights: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def follow(self, model: nn.Module, step: int) -> None:
        """Update the average after step `step`, counted from 1. It starts with the weights after the first step."""
        current = {name: p.detach() for name, p in model.named_parameters()}
        if not self.weights:
            self.weights = {name: p.clone() for name, p in current.items()}
            return

        self._move_to(next(iter(current.values())).device)
        rate = min(self.rate, (1 + step) / (10 + step))
        torch._foreach_lerp_([self.weights[name] for name in current], list(current.values()), 1 - rate)

    @contextmanager
    def instead(self, model: nn.Module) -> Iterator[None]:
        """Give the model the values of the average inside the block. It stays the same object, compiled or not."""
        if not self.weights:  # before the first step
            yield
            return

        params = {name: p.data for name, p in model.named_parameters()}
        self._move_to(next(iter(params.values())).device)

        # The values are swapped in place, so nothing that holds the parameters has to know.
        trained = [p.clone() for p in params.values()]
        torch._foreach_copy_(list(params.values()), [self.weights[name] for name in params])
        try:
            yield
        finally:
            torch._foreach_copy_(list(params.values()), trained)

    def _move_to(self, device: torch.device) -> None:
        """Move the average to `device`: a checkpoint may come from another kind of machine."""
        self.weights = {name: value.to(device) for name, value in self.weights.items()}
