"""Before a call is recorded: whether it can be, tried without leaving a trace; and after: whether a replay is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lockstep.parallel.cudagraph.captures import Capture, Device, Pattern, Trip
from lockstep.parallel.surroundings import SourceContext
from lockstep.parallel.trees import Opaque

# Relative to the length of the tensor. Kernels that add in no fixed order differ by rounding; a wrong replay by more.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
LOW_TOLERANCE = 3e-2  # where something is computed in 16 bits or less


def rehearse(
    make: Callable[[], Trip], patterns: Sequence[Pattern], model: nn.Module, device: Device
) -> tuple[list[set[int]], str | None]:
    """The call there and back, in each of `patterns`, twice: the second time under supervision. Which sources the
    gradient of each result goes to; and what speaks against recording it."""
    with SourceContext(model, device.generator()) as around:
        try:
            reached: list[set[int]] = []
            for pattern in patterns:
                reached = _there_and_back(make(), pattern)  # whatever is still to be compiled, tuned or allocated
                around.restore()
                trip = make()
                versions = [tensor._version for tensor in trip.inputs]
                with device.strict():
                    _there_and_back(trip, pattern)
                if [tensor._version for tensor in trip.inputs] != versions:
                    return [], "it changes its inputs in place"
                if why := _left_behind(trip, around):
                    return [], why
                around.restore()
        except Opaque as error:
            return [], f"it returns {error}"
        except Exception as error:
            return [], first_line(error)
    return reached, None


def _left_behind(trip: Trip, around: SourceContext) -> str | None:
    """What a call has done besides returning something, and a replay would not do."""
    if not trip.keeps_arguments:
        return "it puts something else into its arguments (a cache, say), which a replay would not"
    if around.drawn_on_host():
        return "it draws random numbers on the host"
    if replaced := around.replaced():
        return f"it replaces the buffer {replaced[0]} instead of changing it in place"
    if left := around.attributes_set():
        return f"it sets {left[0]}, which a replay would not"
    return None


def _there_and_back(trip: Trip, pattern: Pattern) -> list[set[int]]:
    trip.forward()
    reached = trip.reached()
    if trip.grad:
        trip.backward([torch.ones_like(o) if g else None for o, g in zip(trip.differentiable, pattern, strict=True)])
    return reached


def compare(capture: Capture, trip: Trip, pattern: Pattern, model: nn.Module, device: Device) -> str | None:
    """A replay against the call itself, `trip`: results, gradients and buffers. What differs. The host waits here."""
    inputs = [tensor.detach().clone() for tensor in trip.inputs]
    with SourceContext(model, device.generator()) as around:
        trip.forward()
        results = [output.detach() for output in trip.outputs]
        starts = [torch.randn_like(o) if g else None for o, g in zip(trip.differentiable, pattern, strict=True)]
        if trip.grad:
            trip.backward(starts)
        left = around.buffers()
        around.restore()
        outputs = capture.forward(inputs)
        gradients = capture.backward(starts) if trip.grad else []
        pairs = [
            ("a result", results, outputs),
            ("a gradient", trip.gradients, gradients),
            ("a buffer", left, around.buffers()),
        ]
        low = torch.is_autocast_enabled(device.type)
        for what, expected, found in pairs:
            if amount := difference(expected, found, low):
                return f"{what} of a replay {amount}"
        return None if capture.result == trip.result else "a replay returns other values"


def difference(expected: Sequence[Tensor | None], found: Sequence[Tensor | None], low: bool) -> str | None:
    """What is wrong with `found`; None: nothing but rounding."""
    if len(expected) != len(found):
        return f"comes as {len(found)} tensors instead of {len(expected)}"
    floats = [e for e in expected if e is not None and e.is_floating_point()]
    largest = max(map(_length, floats), default=0.0)
    for one, other in zip(expected, found, strict=True):
        if one is None or other is None:
            if (one is None) != (other is None):
                return "is there only sometimes"
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            return "has another shape"
        if torch.equal(one, other):
            continue
        if not one.is_floating_point():
            return "differs"
        gap = torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, one.double() - other.double())
        length = _length(one)
        tolerance = LOW_TOLERANCE if low else TOLERANCE.get(one.dtype, LOW_TOLERANCE)
        off = float(torch.linalg.vector_norm(gap))
        # A gradient that is zero but for rounding is measured by the others.
        if not off <= tolerance * (length + 1e-3 * largest):
            return f"differs by {off:.2g}, its length is {length:.2g}"
    return None


def _length(tensor: Tensor) -> float:
    """Of what is finite in it."""
    return float(torch.linalg.vector_norm(torch.where(tensor.isfinite(), tensor, 0.0).double()))


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
