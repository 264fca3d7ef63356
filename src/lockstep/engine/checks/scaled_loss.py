"""Refuses a loss that a GradScaler of torch has scaled: the update would be as many times too large."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from lockstep.errors import UserError

MAX_NODES = 4  # from the end of the graph: `scaler.scale(loss) / n` has one node after the scaling


def check_not_scaled(loss: Any) -> None:
    """Raise if `loss` was multiplied by the scale of a GradScaler. Called for one loss of a run.

    The scaling is a product whose other factor is the scaler's own tensor, so it is found in the graph. Only a product
    with a single number leads to a search for scalers among all objects, which takes some 10 ms.
    """
    factors = _single_factors(loss)
    if not factors:
        return

    places = {factor.data_ptr() for factor in factors}
    for scaler in gc.get_objects():
        # Not by isinstance, which asks an object for its class: that runs the code of a lazy one.
        if not issubclass(type(scaler), GradScaler):
            continue

        scale = getattr(scaler, "_scale", None)  # None until the first call of `scale`; one that is off has none
        if isinstance(scale, Tensor) and scale.data_ptr() in places:
            raise UserError(
                "step.backward got a loss that torch's GradScaler has scaled",
                f"it is multiplied by {scale.item():g}, and nothing would divide the gradients by it again",
                "pass the loss itself, and remove the GradScaler: with precision=fp16 Lockstep scales, and skips steps "
                "that overflow",
            )


def _single_factors(loss: Any) -> list[Tensor]:
    """Return the single numbers, as tensors without a gradient, by which the last operations multiply the loss."""
    factors: list[Tensor] = []
    node = getattr(loss, "grad_fn", None)

    for _ in range(MAX_NODES):
        if node is None:
            break

        if node.name() == "MulBackward0":
            saved = (getattr(node, "_saved_self", None), getattr(node, "_saved_other", None))
            factors += [t for t in saved if type(t) is torch.Tensor and t.numel() == 1 and not t.requires_grad]

        # A sum of several losses, each scaled, is followed along the first one.
        node = next((following for following, _ in node.next_functions if following is not None), None)

    return factors
