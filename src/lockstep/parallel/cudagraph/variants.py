"""One variant of a call, and what its first calls show: how long they take, and which outputs get gradients.

A forward may read attributes of modules besides parameters and buffers. They are checked in every call
(`ModelAttributes`): a changed value means another variant, or invalidates a capture.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.parallel.calls.arguments import OpaqueValue, flatten
from lockstep.parallel.calls.state import PLAIN_TYPES, Pattern, own_attributes
from lockstep.parallel.cudagraph.capture import Capture
from lockstep.parallel.cudagraph.device import CudaDevice

# A capture is expected to save this part of a call, and to take as long as so many calls, until one was timed.
SAVED = 0.5
CAPTURE_CALLS = 12


@dataclass
class RunLength:
    """The steps of a run. A capture pays only if its call comes often enough after it."""

    steps_done: int = 0
    steps_left: int = 0


class Timing(NamedTuple):
    """The time of one forward or backward: the host's launch time, and events at its start and end on the device.

    The events are read later, because reading them makes the host wait for the device.
    """

    host_s: float
    begin: Any
    end: Any


@dataclass
class Variant:
    """One variant of a call of the model, and the state of its capture.

    First `calls` counts up to WARMUP_CALLS, then `capture` is set, then it is `ready`; or it is `refused` for good.
    """

    name: str  # the name of the variant in the log
    training: bool  # called with gradients; graph=true requires that such a variant is captured
    calls: int = 0
    all_calls: int = 0  # replays, too
    forwards: list[Timing] = field(default_factory=list)
    backwards: list[Timing] = field(default_factory=list)
    patterns: list[Pattern] = field(default_factory=list)  # the patterns of its backwards so far, without duplicates
    capture: Capture | None = None
    moves: int = 0
    refused: str | None = None  # the reason why it is not captured

    @property
    def ready(self) -> bool:
        return self.capture is not None and self.capture.compared

    def pays(self, steps: int, steps_left: int, capture_s: float | None) -> bool:
        """Return whether the calls to come are expected to save more time than a capture takes.

        steps: those in which it was called so far
        capture_s: seconds that another capture took; None: not known yet
        """
        # The fastest forward and the fastest backward, as in `seconds`.
        call_s = sum(min(t.host_s for t in timings) for timings in (self.forwards, self.backwards) if timings)
        calls_to_come = self.all_calls * steps_left / max(1, steps)

        return calls_to_come * SAVED * call_s > (capture_s or CAPTURE_CALLS * call_s)

    def seconds(self, device: CudaDevice) -> tuple[float, float]:
        """Return the host's and the device's seconds of forward and backward. The host waits here."""
        host_s = device_s = 0.0
        # Take the fastest run, since the host may have been busy otherwise. Evaluations have no backward.
        for timings in filter(None, (self.forwards, self.backwards)):
            host_s += min(timing.host_s for timing in timings)
            device_s += min(device.elapsed_s(timing.begin, timing.end) for timing in timings)

        return host_s, device_s


def timed_call(call: Callable[[], Any], variant: Variant, device: CudaDevice, refuse: Callable[[str], None]) -> Any:
    """Run a call eagerly, and time its forward and the backward that follows. `refuse` the variant if need be.

    The device is timed by events on its stream, so the host does not wait here.
    """
    begin_s = time.perf_counter()
    begin = device.record_event()
    result = call()

    # Do not count the first call, which compiles and allocates.
    if variant.calls > 1:
        variant.forwards.append(Timing(time.perf_counter() - begin_s, begin, device.record_event()))

    if not variant.training or variant.refused is not None:
        return result

    try:
        tensors, _ = flatten(result)
    except OpaqueValue as error:
        refuse(f"it returns {error}")
        return result

    differentiable = [tensor for tensor in tensors if tensor.requires_grad]

    # If an output is also an input or a parameter, a replay would return a copy of it.
    if any(tensor.grad_fn is None for tensor in differentiable):
        refuse("it returns one of its arguments or parameters")
        return result

    # Hooks on the outputs show which of them get a gradient, and when the first gradient arrives.
    watch = _BackwardWatch(device, variant, len(differentiable), refuse)
    for index, tensor in enumerate(differentiable):
        tensor.register_hook(partial(watch.gradient_arrived, index))

    return result


class _BackwardWatch:
    """Records which outputs get a gradient in the backward of a timed call, and times it from the first gradient on.

    A capture needs to know which outputs will get gradients, and that no backward does something a replay cannot do:
    run twice, or be differentiated again.
    """

    def __init__(self, device: CudaDevice, variant: Variant, outputs: int, refuse: Callable[[str], None]):
        self._device = device
        self._variant = variant
        self._refuse = refuse  # this variant, for a reason
        self._timed = variant.calls > 1
        self._arrived = [False] * outputs

    def gradient_arrived(self, index: int, gradient: Tensor | None) -> None:
        """Note that an output has got its gradient. The first one in a backward starts the clock."""
        # torch also calls the hook for an output without a gradient, if its autograd node has several outputs.
        if gradient is None or self._variant.refused is not None:
            return

        # Autograd enables gradients in a backward with create_graph=True.
        if torch.is_grad_enabled():
            self._refuse("its gradient is differentiated again (create_graph=True)")
        elif self._arrived[index]:
            self._refuse("backward() runs twice through one forward")

        if self._variant.refused is not None:
            return

        if not any(self._arrived):
            self._begin_s = time.perf_counter()
            self._begin = self._device.record_event()
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

        self._arrived[index] = True

    def _end(self) -> None:
        """Called by autograd when the backward has finished."""
        variant = self._variant
        if self._timed:
            host_s = time.perf_counter() - self._begin_s
            variant.backwards.append(Timing(host_s, self._begin, self._device.record_event()))

        # The call returns other outputs than before.
        if variant.patterns and len(variant.patterns[0]) != len(self._arrived):
            variant.patterns = []

        pattern = tuple(self._arrived)
        if pattern not in variant.patterns:
            variant.patterns.append(pattern)


class ModelAttributes:
    """The plain values, tensors and callables that `modules` have as attributes.

    A change of any other object (a list, a configuration) is not noticed.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        self._modules = list(modules)
        # The modules' own dicts. Comparing their sizes is a cheap test for added or deleted attributes.
        self._dicts = [namespace for m in self._modules for namespace in (vars(m), m._modules)]
        self._sizes: list[int] = []

        # The last result of `settings`, and the values that it was built from.
        self._last_values: list[Any] = []
        self._last_key: tuple[Hashable, ...] = ()
        self.refresh()

    def refresh(self) -> None:
        """Find all attributes again if any was added or deleted. Must be called before the values are read."""
        sizes = list(map(len, self._dicts))
        if sizes == self._sizes:
            return

        self._sizes = sizes

        # Group attributes by the type of their value. Other types are not watched.
        slots = [(vars(m), name, value) for m in self._modules for name, value in own_attributes(m).items()]
        self._plain = [(namespace, name) for namespace, name, value in slots if type(value) in PLAIN_TYPES]
        self._tensors = [(namespace, name) for namespace, name, value in slots if type(value) is Tensor]

        # A forward calls submodules too.
        submodules = [(m._modules, name) for m in self._modules for name in m._modules]
        self._callables = [(namespace, name) for namespace, name, value in slots if callable(value)] + submodules

    def settings(self) -> Hashable:
        """Return the plain values (a temperature, a probability) as a key."""
        # `get`, because an attribute may have been deleted. None then counts as a changed value.
        values = [namespace.get(name) for namespace, name in self._plain]

        # Usually nothing has changed, and this comparison is cheaper than building the key.
        if not same_objects(values, self._last_values):
            self._last_values = values
            self._last_key = tuple(value if type(value) in PLAIN_TYPES else type(value) for value in values)

        return self._last_key

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are neither parameters nor buffers."""
        values = [namespace.get(name) for namespace, name in self._tensors]
        return [value for value in values if isinstance(value, Tensor)]

    def callables(self) -> list[Any]:
        """Return submodules, and functions such as a `forward` that was set on an instance."""
        return [namespace.get(name) for namespace, name in self._callables]


def same_objects(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Return whether both have the same objects in the same order, compared by identity."""
    return len(left) == len(right) and all(map(is_, left, right))
