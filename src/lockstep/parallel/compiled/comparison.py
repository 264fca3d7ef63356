"""Calls without side effects, and the comparison of compiled with eager ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lockstep.parallel.calls.state import StateSnapshot
from lockstep.parallel.compiled.batch_sizes import Arguments, Dims, tensors_in
from lockstep.task import Loss

# How far compiled code may differ from eager code, relative to the norm: in float32, and if anything is computed in 16
# bits or in TF32. Fused kernels round less often, so they differ in the last bits; a wrong kernel differs far more.
TOLERANCE = 1e-3
LOW_PRECISION_TOLERANCE = 0.1
# A gradient that is small compared with all of them together is allowed an error of this part of theirs.
SMALL = 0.05
# With dropout, compiled code draws other masks than eager code. Then all gradients together may differ by this many
# times as much as those of two eager calls with different random numbers.
RANDOM = 2.0


@dataclass
class CallResult:
    """The results of one forward and backward."""

    results: list[Tensor]  # those that have a gradient; of a Loss, its total, and its weight
    gradients: list[Tensor | None]
    changed: list[str]  # the attributes of modules that the call has changed
    buffers: dict[str, Tensor]  # after the call


def run_isolated(
    call: Callable[..., Any],
    arguments: Arguments,
    parameters: Sequence[nn.Parameter],
    before: StateSnapshot,
    dynamic: Dims = frozenset(),
) -> CallResult:
    """Run forward and backward on copies of the arguments. That leaves no gradients on the parameters.

    before: the state of the model before the call
    dynamic: the dimensions to mark, so that torch compiles for all of their sizes
    """
    # Copies, because a call may change its arguments, and the step still needs the batch.
    args, kwargs = arguments
    args, kwargs = tree_map(_copy, (args, dict(kwargs)))
    tensors = tensors_in((args, kwargs))
    for index, dim in dynamic:
        torch._dynamo.mark_dynamic(tensors[index], dim)

    # Autocast caches converted weights. This call must neither use copies from outside nor leave its own behind.
    torch.clear_autocast_cache()
    returned = call(*args, **kwargs)
    torch.clear_autocast_cache()

    # The backward starts from `results`; `others` are only compared. Of a Loss that is the weight: a wrong one would
    # scale every gradient. Metrics are not compared, since rounding may change them.
    if isinstance(returned, Loss):
        results = [returned.total]
        others = [torch.as_tensor(returned.weight, dtype=torch.float64)]
    else:
        # A model may leave a part of its loss in an attribute.
        results = [found for found in tensors_in([returned, before.changed_values()]) if found.requires_grad]
        others = []
        if not results:
            raise ValueError("it returns no tensor that has a gradient")

    # Not backward(), which would leave gradients on the parameters. Each result gets a gradient of ones, and autocast
    # is off, as in the backward of a step.
    with torch.autocast(results[0].device.type, enabled=False):
        ones = [torch.ones_like(result) for result in results]
        gradients = torch.autograd.grad(results, parameters, ones, allow_unused=True)

    # A backward that recomputes activations converts weights as well.
    torch.clear_autocast_cache()
    outputs = [result.detach() for result in [*results, *others]]
    return CallResult(outputs, list(gradients), before.changed_attributes(), before.registered_buffers())


def difference(expected: CallResult, found: CallResult) -> float:
    """Return the largest relative difference between two results; infinite if they do not have the same parts."""
    if len(expected.results) != len(found.results):
        return math.inf

    # Results are compared one by one, each relative to its own norm.
    results = zip(expected.results, found.results, strict=True)
    differences = [_relative(a, b, floor=0.0) for a, b in results]

    # A gradient that is nearly zero consists of rounding errors, so it is measured against all gradients together.
    pairs = _gradient_pairs(expected, found)
    together = sum(_norm(a) ** 2 for a, _ in pairs) ** 0.5
    differences += [_relative(a, b, floor=SMALL * together) for a, b in pairs]
    return max(differences)


def missing_effects(expected: CallResult, found: CallResult) -> list[str]:
    """Return the names of attributes and buffers that only one of two calls has changed or registered."""
    apart = set(expected.changed) ^ set(found.changed) | set(expected.buffers) ^ set(found.buffers)
    return sorted(name.lstrip(".0123456789") for name in apart)


def buffer_difference(expected: CallResult, found: CallResult) -> float:
    """Return the largest relative difference between the buffers that two calls have left."""
    pairs = [(value, found.buffers[name]) for name, value in expected.buffers.items()]

    # Most do not change at all, and a mask may hold infinities.
    return max((_relative(a, b, floor=0.0) for a, b in pairs if not _equal(a, b)), default=0.0)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()))


def gradient_difference(expected: CallResult, found: CallResult) -> float:
    """Return the relative difference between all gradients together: for calls that draw random numbers."""
    # As if all gradients were one vector.
    pairs = _gradient_pairs(expected, found)
    distance = sum(_norm(a.float() - b.float()) ** 2 for a, b in pairs) ** 0.5
    size = sum(_norm(a) ** 2 for a, _ in pairs) ** 0.5
    return distance / size if size > 0 else math.inf


def _gradient_pairs(expected: CallResult, found: CallResult) -> list[tuple[Tensor, Tensor]]:
    """Return (expected, found) for each parameter that has a gradient in one of the two."""
    # Compiled code may return zeros where eager code returns no gradient.
    pairs = []
    for a, b in zip(expected.gradients, found.gradients, strict=True):
        if a is not None:
            pairs.append((a, torch.zeros_like(a) if b is None else b))
        elif b is not None:
            pairs.append((torch.zeros_like(b), b))

    return pairs


def _relative(expected: Tensor, found: Tensor, floor: float) -> float:
    """Return the norm of the difference, relative to the norm of `expected`, or to `floor` if that is larger."""
    if expected.shape != found.shape:
        return math.inf

    distance = _norm(expected.float() - found.float())
    if distance == 0.0:
        return 0.0

    # A result that is not finite differs from everything: nan is not below any tolerance.
    size = max(_norm(expected), floor)
    if size == 0.0 or math.isnan(distance):
        return math.inf
    return distance / size


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.float()))  # the host waits for the device


def _copy(value: Any) -> Any:
    """Return a copy of a tensor, or of a container that holds tensors; anything else as it is."""
    if isinstance(value, Tensor):
        return _copy_tensor(value)

    # A container that torch does not know, see `tensors_in`.
    is_container = isinstance(value, Mapping) or is_dataclass(value)
    return copy.deepcopy(value) if is_container and tensors_in(value) else value


def _copy_tensor(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides; the tensor itself if it cannot be copied by its elements."""
    # Subclasses, sparse and expanded tensors cannot. A call rarely changes them.
    if type(tensor) is not Tensor or tensor.layout != torch.strided or 0 in tensor.stride():
        return tensor

    # torch compiles for the strides as well.
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return empty.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)
