"""Try whether a call can be captured, without side effects; and compare a replay with a plain call afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lockstep.parallel.call_arguments import OpaqueValue
from lockstep.parallel.call_state import Pattern, StateSnapshot, TrialCall
from lockstep.parallel.cudagraph.capture import Capture
from lockstep.parallel.cudagraph.device import CudaDevice

# Relative to the norm of the tensor. Kernels that add in no fixed order cause rounding differences; a wrong replay
# differs by more.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
LOW_TOLERANCE = 3e-2  # where something is computed in 16 bits or less


def dry_run(
    make_trial: Callable[[], TrialCall], patterns: Sequence[Pattern], model: nn.Module, device: CudaDevice
) -> tuple[list[set[int]], str | None]:
    """Run forward and backward for each of `patterns` twice, the second time with synchronisation forbidden.

    Returns for each output the indices of the sources that its gradient reaches, and why the call cannot be captured.
    """
    with StateSnapshot(model, device.generator()) as before:
        try:
            reached: list[set[int]] = []
            for pattern in patterns:
                # The first run compiles, tunes and allocates whatever is still missing.
                reached = _run(make_trial(), pattern)
                before.restore()

                trial = make_trial()
                versions = [tensor._version for tensor in trial.inputs]

                # In the second run nothing is missing, so a synchronisation comes from the model itself.
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
    reached = trial.sources_reached()  # read from the graph, which the backward frees
    if trial.grad:
        pairs = zip(trial.differentiable, pattern, strict=True)
        trial.backward([torch.ones_like(output) if arrives else None for output, arrives in pairs])

    return reached


def _side_effect(trial: TrialCall, before: StateSnapshot) -> str | None:
    """Return what Python did in the call besides returning a value. A replay only launches kernels."""
    if not trial.keeps_arguments:
        return "it puts something else into its arguments (a cache, say), which a replay would not"

    if before.used_host_random():
        return "it draws random numbers on the host"

    if replaced := before.replaced_buffers():
        return f"it replaces the buffer {replaced[0]} instead of changing it in place"
    if changed := before.changed_attributes():
        return f"it sets {changed[0]}, which a replay would not"

    return None


def compare(capture: Capture, trial: TrialCall, pattern: Pattern, model: nn.Module, device: CudaDevice) -> str | None:
    """Return how a replay differs from a plain call in outputs, gradients or buffers. The host waits here."""
    # The trial may change its inputs in place.
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
        for what, expected, replayed in (
            ("a result", plain_outputs, outputs),
            ("a gradient", trial.gradients.get(pattern, []), gradients),
            ("a buffer", plain_buffers, before.buffers()),
        ):
            if amount := difference(expected, replayed, low):
                return f"{what} of a replay {amount}"

        return None if capture.trial.output_spec == trial.output_spec else "a replay returns other values"


def difference(expected: Sequence[Tensor | None], replayed: Sequence[Tensor | None], low: bool) -> str | None:
    """Return what is wrong with `replayed`, and None if it differs by rounding only. `low`: 16 bits are expected."""
    if len(expected) != len(replayed):
        return f"comes as {len(replayed)} tensors instead of {len(expected)}"

    floats = [tensor for tensor in expected if tensor is not None and tensor.is_floating_point()]
    largest = max(map(_finite_norm, floats), default=0.0)

    # A gradient may be missing (None), but then on both sides.
    for plain, replay in zip(expected, replayed, strict=True):
        if plain is not None and replay is not None:
            if why := _tensor_difference(plain, replay, low, largest):
                return why
        elif plain is not replay:
            return "is there only sometimes"

    return None


def _tensor_difference(plain: Tensor, replay: Tensor, low: bool, largest: float) -> str | None:
    """`largest` is the largest norm of all tensors compared."""
    if plain.shape != replay.shape or plain.dtype != replay.dtype:
        return "has another shape"
    if torch.equal(plain, replay):
        return None
    if not plain.is_floating_point():
        return "differs"

    # Equal infinities, and NaN on both sides, do not count as a difference.
    both_nan = plain.isnan() & replay.isnan()
    gap = torch.where((plain == replay) | both_nan, 0.0, plain.double() - replay.double())
    off = float(torch.linalg.vector_norm(gap))
    norm = _finite_norm(plain)
    tolerance = LOW_TOLERANCE if low else TOLERANCE.get(plain.dtype, LOW_TOLERANCE)

    # Relative to the other tensors as well: a gradient that should be zero may consist of rounding errors. `not <=`:
    # NaN counts as a difference.
    if not off <= tolerance * (norm + 1e-3 * largest):
        return f"differs by {off:.2g}, its norm is {norm:.2g}"

    return None


def _finite_norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(torch.where(tensor.isfinite(), tensor, 0.0).double()))


def first_line(error: BaseException) -> str:
    """Return the type and the first line of an error's message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
