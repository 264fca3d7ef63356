"""Finds a mean where `step.backward` of a custom loop needs a sum: the gradient would be divided twice.

The loss of a loop cannot be called again, so only the graph of its first loss is read. Means that a compiled graph or
an operation of the user's own computes are not seen.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lockstep.causes import Cause, named

MEAN = 1  # torch's number for reduction="mean"

# What these operations return may be sums over the samples, for each of several views or heads.
SUMS = ("SumBackward0", "StackBackward0", "CatBackward0")

# These operations leave a mean a mean.
NEUTRAL = ("NegBackward0", "ToCopyBackward0", "SqueezeBackward0", "ViewBackward0")


def find_mean(loss: Any, weight: Any) -> Cause | None:
    """Return the cause "mean-for-sum" if the last operation of `loss` is a mean, and `weight` counts several terms.

    A product such as `mean * len(y)` is a sum again. A quotient by a number above 1 is still a mean.
    """
    node = getattr(loss, "grad_fn", None)
    while node is not None and (node.name() in NEUTRAL or _divides_by_number(node)):
        node = node.next_functions[0][0]

    if node is None or not _is_mean(node):
        return None

    # A weight of another shape is refused elsewhere.
    if isinstance(weight, Tensor) and weight.numel() != 1:
        return None

    # Read last, because the host waits for a weight on the GPU. A weight of 0 does not count, whatever the loss.
    terms = float(weight)
    if terms in (0.0, 1.0):
        return None

    return named("mean-for-sum", f"step.backward got a mean ({node.name()}) with weight={terms:g}")


def _divides_by_number(node: Any) -> bool:
    """Whether the node divides its first argument by a single number above 1."""
    if node.name() != "DivBackward0" or node.next_functions[1][0] is not None:
        return False

    divisor = node._saved_other
    return isinstance(divisor, Tensor) and divisor.numel() == 1 and divisor.item() > 1


def _is_mean(node: Any) -> bool:
    """Whether the node takes a mean over several numbers: that of a single one is its sum."""
    if node.name() in ("MeanBackward0", "MeanBackward1"):
        return node._saved_self_sym_numel > 1 and not _sums_over_samples(node.next_functions[0][0])

    # torch's losses, such as cross_entropy and mse_loss.
    if getattr(node, "_saved_reduction", None) != MEAN:
        return False

    target = getattr(node, "_saved_target", None)
    return not isinstance(target, Tensor) or target.numel() > 1


def _sums_over_samples(node: Any) -> bool:
    """Whether the node may return sums over the samples. The mean of those is one over features, views or heads."""
    if node is None or node.name() != "SumBackward1":
        return node is not None and node.name() in SUMS

    # torch saves a negative dimension as an unsigned number.
    dims = [dim - 2**64 if dim >= 2**63 else dim for dim in node._saved_dim]
    return any(dim % len(node._saved_self_sym_sizes) == 0 for dim in dims)
