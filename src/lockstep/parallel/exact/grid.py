"""The grid of exact mode for weights and losses, on which sums do not depend on the order of the additions.

float64 sums of multiples of 1/grid are exact in any order, as long as they stay below 2^53 / grid. So the device can
add control words. Log lines may hold numbers of any size, which `ExactSums` adds on the host.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError

WEIGHT_GRID = 2.0**32  # grid for weights: their sum is exact below 2^21 per step
LOSS_GRID = 2.0**20  # grid for losses in spike detection: their sum is exact below 2^33

MAX_ROUNDING = 1e-6  # the largest relative change of a weight by rounding it to its grid


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
