"""Before a call is recorded: whether it can be, tried without leaving a trace; and after: whether a replay is right."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.parallel.attributes import Attributes
from lockstep.parallel.captures import Capture, Device, Pattern, Trip
from lockstep.parallel.trees import Opaque

# Relative to the length of the tensor. Kernels that add in no fixed order differ by rounding; a wrong replay by more.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
LOW_TOLERANCE = 3e-2  # where something is computed in 16 bits or less


class Surroundings:
    """What a call changes besides its results: buffers, attributes and random numbers. As they are now, to come back
    to."""

    def __init__(self, model: nn.Module, generator: torch.Generator):
        self._generators = [torch.default_generator, generator]
        self._states = [generator.get_state() for generator in self._generators]
        self._host = random.getstate(), np.random.get_state()
        owners = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
        self._buffers = [(module, name, buffer, buffer.clone()) for module, name, buffer in owners]
        self._attributes = Attributes(model)

    def restore(self) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
        random.setstate(self._host[0])
        np.random.set_state(self._host[1])
        for module, name, buffer, value in self._buffers:
            module._buffers[name] = buffer
            with torch.no_grad():
                buffer.copy_(value)
        self._attributes.restore()

    def buffers(self) -> list[Tensor]:
        return [buffer.clone() for _, _, buffer, _ in self._buffers]

    def drawn_on_host(self) -> bool:
        """Random numbers of the host, which a replay would not draw again."""
        host, device = self._generators
        torchs = host is device or torch.equal(host.get_state(), self._states[0])
        numpys = all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), self._host[1], strict=True))
        return not (torchs and numpys and random.getstate() == self._host[0])

    def replaced(self) -> list[str]:
        """Buffers that are other tensors now."""
        return [name for module, name, buffer, _ in self._buffers if module._buffers.get(name) is not buffer]

    def attributes_set(self) -> list[str]:
        return self._attributes.changed()


def rehearse(
    make: Callable[[], Trip], patterns: Sequence[Pattern], model: nn.Module, device: Device
) -> tuple[list[set[int]], str | None]:
    """The call there and back, in each of `patterns`, twice: the second time under supervision. Which sources the
    gradient of each result goes to; and what speaks against recording it."""
    around = Surroundings(model, device.generator())
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
    finally:
        around.restore()
    return reached, None


def _left_behind(trip: Trip, around: Surroundings) -> str | None:
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
    around = Surroundings(model, device.generator())
    inputs = [tensor.detach().clone() for tensor in trip.inputs]
    try:
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
    finally:
        around.restore()


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
