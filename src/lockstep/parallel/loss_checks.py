"""What a loss may be: its total, its weight and its metrics are checked where the user's code returns them.

Exact mode has a grid for weights and losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.observe.metrics import LOSS_NAMES, Term, detached
from lockstep.task import Loss, Weight

# Exact mode rounds weights and losses to a grid, so that their sums do not depend on the order of the additions.
# float64 sums of multiples of 1/grid are exact in any order, as long as they stay below 2^53 / grid. So the device can
# sum control words. Log lines may hold numbers of any size, which `ExactSums` adds on the host.
WEIGHT_GRID = 2.0**32  # grid for weights: their sum is exact below 2^21 per step
LOSS_GRID = 2.0**20  # grid for losses in spike detection: their sum is exact below 2^33

MAX_ROUNDING = 1e-6  # the largest relative change of a weight by rounding it to its grid


def check_total(loss: Loss) -> None:
    """Raise unless the loss is a Loss, with a total that can be backpropagated."""
    if not isinstance(loss, Loss):
        raise UserError(
            f"loss() must return lockstep.Loss(total, weight); it returned a {type(loss).__name__}",
            "",
            "return lockstep.Loss(total, weight=...): the SUM over the micro-batch, and how many terms it has",
        )

    if not isinstance(loss.total, Tensor):
        raise UserError(
            f"the total of a loss must be a tensor with a gradient; it is a {type(loss.total).__name__}",
            "",
            "remove .item() or float(): Loss(per_sample_loss.sum(), weight=len(batch))",
        )

    if loss.total.dim() != 0 or not loss.total.requires_grad:
        raise UserError(
            f"the loss must be one number with a gradient, the SUM over the micro-batch; it has the shape "
            f"{tuple(loss.total.shape)} and requires_grad={loss.total.requires_grad}",
            "",
            "return Loss(per_sample_loss.sum(), weight=len(batch)), computed with gradients on",
        )


def checked_weight(weight: Any) -> Weight:
    """Return the weight of a loss without its graph, or raise if it is not one finite number of at least 0."""
    # A graph would keep the activations of the step alive until the log line.
    is_tensor = isinstance(weight, Tensor)
    if is_tensor:
        weight = weight.detach()

    # Plain numbers first: isinstance(x, SupportsFloat) is many times slower.
    is_number = weight.numel() == 1 if is_tensor else isinstance(weight, (int, float, SupportsFloat))
    if not is_number:
        shape = f" {tuple(weight.shape)}" if is_tensor else ""
        raise UserError(
            f"the weight of a loss is the number of its terms; it cannot be a {type(weight).__name__}{shape}",
            "",
            "return Loss(total, weight=len(batch)), or the number of tokens: mask.sum()",
        )

    # A weight on the GPU is not checked here, because the host would wait for it: `OutcomeHandler.check` looks at the
    # sum.
    if not (is_tensor and weight.is_cuda) and not 0 <= float(weight) < math.inf:
        raise wrong_weight(weight)

    return weight


def wrong_weight(weight: Weight) -> UserError:
    return UserError(
        f"the weight of a loss is the number of its terms; it cannot be {weight}",
        "",
        "return a finite weight of 0 or more",
    )


# ---- metrics ----


def check_metric_name(name: str) -> None:
    """Raise if the name is one of the loss, which the metric would overwrite in the log."""
    if name in LOSS_NAMES:
        raise UserError(
            f"a metric is named {name!r}, which is the name of the loss itself", "", "give the metric another name"
        )


def metric_terms(loss: Loss) -> Iterator[Term]:
    """Yield each metric, detached. A metric without a weight has the weight of the loss."""
    for name, value in loss.metrics.items():
        check_metric_name(name)

        # A pair is (sum, weight); a single number takes the weight of the loss.
        total, weight = value if isinstance(value, tuple) else (value, loss.weight)
        for number in (total, weight):
            if isinstance(number, Tensor) and number.numel() != 1:
                raise UserError(
                    f"the metric {name!r} must be one number, the SUM over the micro-batch; it has the shape "
                    f"{tuple(number.shape)}",
                    "",
                    f"return its sum: metrics={{{name!r}: values.sum()}}",
                )

        yield name, detached(total), detached(weight)


# ---- exact mode ----


def on_grid(value: float | Tensor, grid: float) -> Any:
    """Return `value`, a number or a tensor of any shape, rounded to the nearest multiple of 1/grid."""
    if isinstance(value, Tensor):
        return torch.round(value.double() * grid) / grid

    return round(value * grid) / grid if math.isfinite(value) else value


def check_representable(weight: float) -> None:
    """Check that rounding to the grid does not change the weight, which would change the training."""
    if abs(on_grid(weight, WEIGHT_GRID) - weight) > MAX_ROUNDING * weight:
        raise UserError(
            f"exact=true cannot represent a weight of {weight:.3g}",
            "it rounds weights to multiples of 2^-32, which would change this one",
            "multiply the loss and its weight by the same large number, such as 1e6: the training stays the same",
        )
