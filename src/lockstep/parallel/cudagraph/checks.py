"""Test whether a call can be captured, without side effects, and compare a replay with an eager call afterwards.

A capture records kernels, not Python. A call whose Python does something each time, or whose result depends on values
that the host reads, must not be captured: a replay would go on doing what the first call did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lockstep.parallel.calls.arguments import OpaqueValue
from lockstep.parallel.calls.state import Pattern, StateSnapshot, TrialCall
from lockstep.parallel.cudagraph.capture import Capture
from lockstep.parallel.cudagraph.device import CudaDevice

# Relative to the norm of the tensor. Kernels without a fixed order of additions cause rounding differences; a wrong
# replay differs by more.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
LOW_TOLERANCE = 3e-2  # the tolerance for computations in 16 bits or less


def dry_run(
    make_trial: Callable[[], TrialCall], patterns: Sequence[Pattern], model: nn.Module, device: CudaDevice
) -> tuple[list[set[int]], str | None]:
    """Run forward and backward for each of `patterns` twice, the second time with synchronisation forbidden.

    Returns, for each output, the indices of the sources that it depends on; and the reason why the call cannot be
    captured, or None.
    """
    with StateSnapshot(model, device.generator()) as before:
        try:
            reached: list[set[int]] = []
            for pattern in patterns:
                # The first run may still compile, tune and allocate.
                reached = _run(make_trial(), pattern)
                before.restore()

                trial = make_trial()
                versions = [tensor._version for tensor in trial.inputs]

                # In the second run, a synchronisation can only come from the model itself.
                with device.forbid_sync(), _as_if_captured():
                    _run(trial, pattern)

                if [tensor._version for tensor in trial.inputs] != versions:
                    return [], "it changes its inputs in place"

                side_effect = _side_effect(trial, before)
                if side_effect:
                    return [], side_effect

                before.restore()
        except OpaqueValue as error:
            return [], f"it returns {error}"
        except Exception as error:
            return [], first_line(error)

    return reached, None


@contextmanager
def _as_if_captured() -> Iterator[None]:
    """Answer code that asks whether it is captured. Models of transformers read their mask on the host if not."""
    original = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = original


def _run(trial: TrialCall, pattern: Pattern) -> list[set[int]]:
    """Run a forward, and a backward from the outputs that `pattern` names. Return `TrialCall.sources_reached`."""
    trial.forward()
    reached = trial.sources_reached()  # read from the graph, which the backward frees
    if trial.grad:
        pairs = zip(trial.differentiable, pattern, strict=True)
        trial.backward([torch.ones_like(output) if has_gradient else None for output, has_gradient in pairs])

    return reached


def _side_effect(trial: TrialCall, before: StateSnapshot) -> str | None:
    """Return a side effect of the call's Python code, which a replay would not have: it only launches kernels."""
    if not trial.keeps_arguments:
        return "it changes the content of its arguments (a cache, for example), which a replay would not"

    if before.used_host_random():
        return "it draws random numbers on the host"

    replaced = before.replaced_buffers()
    if replaced:
        return f"it replaces the buffer {replaced[0]} instead of changing it in place"

    changed = before.changed_attributes()
    return f"it sets {changed[0]}, which a replay would not" if changed else None


def compare(capture: Capture, trial: TrialCall, pattern: Pattern, model: nn.Module, device: CudaDevice) -> str | None:
    """Return how a replay differs from an eager call in outputs, gradients or buffers, or None. The host waits here."""
    # The trial may change its inputs in place.
    inputs = [tensor.detach().clone() for tensor in trial.inputs]
    with StateSnapshot(model, device.generator()) as before:
        trial.forward()
        eager_outputs = [output.detach() for output in trial.outputs]

        # Use random gradients: with ones, errors could cancel.
        pairs = zip(trial.differentiable, pattern, strict=True)
        grad_outputs = [torch.randn_like(output) if has_gradient else None for output, has_gradient in pairs]
        if trial.grad:
            trial.backward(grad_outputs)

        eager_buffers = before.current_buffers()

        # The replay starts from the same buffers and random numbers.
        before.restore()
        outputs = capture.forward(inputs)
        gradients = capture.backward(grad_outputs) if trial.grad else []

        # With autocast even float32 results were computed in 16 bits.
        low_precision = torch.is_autocast_enabled(device.type)
        for subject, expected, replayed in (
            ("a result", eager_outputs, outputs),
            ("a gradient", trial.gradients.get(pattern, []), gradients),
            ("a buffer", eager_buffers, before.current_buffers()),
        ):
            problem = difference(expected, replayed, low_precision)
            if problem:
                return f"{subject} of a replay {problem}"

        return None if capture.trial.output_spec == trial.output_spec else "a replay returns other values"


def difference(expected: Sequence[Tensor | None], replayed: Sequence[Tensor | None], low_precision: bool) -> str | None:
    """Return how `replayed` differs from `expected`, or None if only by rounding (of 16 bits with `low_precision`)."""
    if len(expected) != len(replayed):
        return f"comes as {len(replayed)} tensors instead of {len(expected)}"

    # A tensor that is nearly zero is compared with the largest of them.
    floats = [tensor for tensor in expected if tensor is not None and tensor.is_floating_point()]
    largest = max(map(_finite_norm, floats), default=0.0)

    # A gradient may be missing (None), but then on both sides.
    for eager, replay in zip(expected, replayed, strict=True):
        if eager is not None and replay is not None:
            problem = _tensor_difference(eager, replay, low_precision, largest)
            if problem:
                return problem
        elif eager is not replay:
            return "is missing, or there is one too many"

    return None


def _tensor_difference(eager: Tensor, replay: Tensor, low_precision: bool, largest: float) -> str | None:
    """Return how two tensors differ, or None. `largest` is the largest norm of all tensors compared."""
    if eager.shape != replay.shape or eager.dtype != replay.dtype:
        return "has another shape"

    if torch.equal(eager, replay):
        return None

    if not eager.is_floating_point():
        return "differs"

    # Equal infinities, and NaN on both sides, do not count as a difference.
    both_nan = eager.isnan() & replay.isnan()
    differences = torch.where((eager == replay) | both_nan, 0.0, eager.double() - replay.double())
    error = float(torch.linalg.vector_norm(differences))
    norm = _finite_norm(eager)
    tolerance = LOW_TOLERANCE if low_precision else TOLERANCE.get(eager.dtype, LOW_TOLERANCE)

    # Compare with the other tensors as well: a gradient that should be zero may consist of rounding errors. Written as
    # `not <=`, so that NaN counts as a difference.
    if not error <= tolerance * (norm + 1e-3 * largest):
        return f"differs by {error:.2g}, its norm is {norm:.2g}"

    return None


def _finite_norm(tensor: Tensor) -> float:
    """Return the norm of the elements that are finite. The host waits for the device."""
    return float(torch.linalg.vector_norm(torch.where(tensor.isfinite(), tensor, 0.0).double()))


def first_line(error: BaseException) -> str:
    """Return the type and the first line of an error's message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
