"""Whether a call can be captured, tried before without side effects; and whether a replay is right, compared after."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lockstep.parallel.call_arguments import OpaqueValue
from lockstep.parallel.call_state import StateSnapshot, TrialCall
from lockstep.parallel.cudagraph.capture import Capture, Pattern
from lockstep.parallel.cudagraph.device import Device

# Relative to the norm of the tensor. Kernels that add in no fixed order differ by rounding; a wrong replay by more.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
LOW_TOLERANCE = 3e-2  # where something is computed in 16 bits or less


def dry_run(
    make_trial: Callable[[], TrialCall], patterns: Sequence[Pattern], model: nn.Module, device: Device
) -> tuple[list[set[int]], str | None]:
    """Run forward and backward for each of `patterns` twice, the second time with synchronisation forbidden.

    Returns for each output the indices of the sources that its gradient reaches, and why the call cannot be captured.
    """
    with StateSnapshot(model, device.generator()) as before:
        try:
            reached: list[set[int]] = []
            for pattern in patterns:
                # Whatever is still to be compiled, tuned or allocated happens here.
                reached = _run(make_trial(), pattern)
                before.restore()

                trial = make_trial()
                versions = [tensor._version for tensor in trial.inputs]
                # The second time nothing is new any more, so a synchronisation is the model's own.
                with device.forbid_sync():
                    _run(trial, pattern)

                if [tensor._version for tensor in trial.inputs] != versions:
                    return [], "it changes its inputs in place"
                if why := _side_effect(trial, before):
                    return [], why

                before.restore()
        except OpaqueValue as error:
            return [], f"it returns {error}"
        except Exception as error:
            return [], first_line(error)

    return reached, None


def _run(trial: TrialCall, pattern: Pattern) -> list[set[int]]:
    trial.forward()
    # Read from the graph, which the backward frees.
    reached = trial.sources_reached()
    if trial.grad:
        pairs = zip(trial.differentiable, pattern, strict=True)
        trial.backward([torch.ones_like(output) if arrives else None for output, arrives in pairs])
    return reached


def _side_effect(trial: TrialCall, before: StateSnapshot) -> str | None:
    """Return what the call did besides returning something; a replay would not do it."""
    # A replay launches kernels and returns tensors. All that Python does besides is lost.
    if not trial.keeps_arguments:
        return "it puts something else into its arguments (a cache, say), which a replay would not"
    if before.used_host_random():
        return "it draws random numbers on the host"
    if replaced := before.replaced_buffers():
        return f"it replaces the buffer {replaced[0]} instead of changing it in place"
    if changed := before.changed_attributes():
        return f"it sets {changed[0]}, which a replay would not"
    return None


def compare(capture: Capture, trial: TrialCall, pattern: Pattern, model: nn.Module, device: Device) -> str | None:
    """Return how a replay differs from a plain call in outputs, gradients or buffers. The host waits here."""
    # The trial may change its own inputs.
    inputs = [tensor.detach().clone() for tensor in trial.inputs]
    with StateSnapshot(model, device.generator()) as before:
        trial.forward()
        plain_outputs = [output.detach() for output in trial.outputs]

        # Random gradients: with ones, errors could cancel.
        pairs = zip(trial.differentiable, pattern, strict=True)
        grad_outputs = [torch.randn_like(output) if arrives else None for output, arrives in pairs]
        if trial.grad:
            trial.backward(grad_outputs)

        plain_buffers = before.buffers()

        # The replay starts from the same buffers and random numbers.
        before.restore()
        outputs = capture.forward(inputs)
        gradients = capture.backward(grad_outputs) if trial.grad else []

        low = torch.is_autocast_enabled(device.type)
        for what, expected, found in (
            ("a result", plain_outputs, outputs),
            ("a gradient", trial.gradients, gradients),
            ("a buffer", plain_buffers, before.buffers()),
        ):
            if amount := difference(expected, found, low):
                return f"{what} of a replay {amount}"

        return None if capture.output_spec == trial.output_spec else "a replay returns other values"


def difference(expected: Sequence[Tensor | None], found: Sequence[Tensor | None], low: bool) -> str | None:
    """Return what is wrong with `found`, and None if it differs by rounding only. `low`: 16 bits are expected."""
    if len(expected) != len(found):
        return f"comes as {len(found)} tensors instead of {len(expected)}"

    floats = [tensor for tensor in expected if tensor is not None and tensor.is_floating_point()]
    largest = max(map(_finite_norm, floats), default=0.0)
    for one, other in zip(expected, found, strict=True):
        if one is None or other is None:
            if one is not other:
                return "is there only sometimes"
        elif why := _tensor_difference(one, other, low, largest):
            return why

    return None


def _tensor_difference(one: Tensor, other: Tensor, low: bool, largest: float) -> str | None:
    """`largest` is the largest norm of all tensors compared."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return "has another shape"
    if torch.equal(one, other):
        return None
    if not one.is_floating_point():
        return "differs"

    # Equal infinities, and NaN on both sides, are no difference.
    both_nan = one.isnan() & other.isnan()
    gap = torch.where((one == other) | both_nan, 0.0, one.double() - other.double())
    off = float(torch.linalg.vector_norm(gap))
    norm = _finite_norm(one)
    tolerance = LOW_TOLERANCE if low else TOLERANCE.get(one.dtype, LOW_TOLERANCE)

    # A gradient that is zero but for rounding is measured by the others. `not <=`: NaN is a difference.
    if not off <= tolerance * (norm + 1e-3 * largest):
        return f"differs by {off:.2g}, its norm is {norm:.2g}"
    return None


def _finite_norm(tensor: Tensor) -> float:
    """Return the norm of the finite elements."""
    return float(torch.linalg.vector_norm(torch.where(tensor.isfinite(), tensor, 0.0).double()))


def first_line(error: BaseException) -> str:
    """Return the type and the first line of an error's message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
