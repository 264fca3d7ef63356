"""Capture the calls of a launch-bound model, whose kernels finish faster than the host launches them, and replay them.

We capture the model's forward and backward. `task.loss` may run arbitrary Python: it is captured only if it was
compiled as one graph, and only while all that it reads is unchanged (compiled/constants.py). Every variant of a call
(shapes, modes, other arguments) goes through the same stages: a few eager calls are timed, to see whether the device
waits for the host; then the call is tested, captured, and compared with an eager call; from then on it is replayed. If
a variant is not replayed, the reason is logged.

Two alternatives were measured: `torch.compile(mode="reduce-overhead")` needs tens of seconds to compile and does not
trace every model; `torch.cuda.make_graphed_callables` gives wrong gradients when they are accumulated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.parallel.batchnorm.sync import is_synchronised
from lockstep.parallel.call_arguments import OpaqueValue, flatten
from lockstep.parallel.call_chain import CallChain, Link
from lockstep.parallel.call_state import Pattern, StateSnapshot, TrialCall
from lockstep.parallel.cudagraph.attributes import AttributeWatch, same_objects
from lockstep.parallel.cudagraph.capture import Capture
from lockstep.parallel.cudagraph.checks import compare, dry_run, first_line
from lockstep.parallel.cudagraph.device import CudaDevice
from lockstep.runtime.context import EventLogger, Runtime

WARMUP_CALLS = 5  # eager calls before a capture; the first ones compile, tune and allocate
LAUNCH_BOUND = 0.7  # a call is launch-bound if the host needs at least this fraction of the device's time to launch it
MAX_CAPTURES = 8
MAX_VARIANTS = 64  # with or without a capture
MAX_MOVES = 2  # how often tensors may move, or submodules be replaced, before a variant is no longer captured
MAX_PATTERNS = 6  # patterns of outputs with gradients per variant, each with its own backward
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def wants_graph(config: RunConfig, runtime: Runtime) -> bool:
    """Whether to capture calls. config/conflicts.py refuses settings that cannot be combined with graph=true."""
    on_cuda = runtime.device.type == "cuda"
    if config.graph is True and not on_cuda:
        raise UserError(
            f"graph=true needs a GPU; the device is {runtime.device.type}",
            "CUDA graphs are for GPUs",
            "leave graph out",
        )

    if config.graph != "auto":
        return config.graph

    # With auto, only if the model's forward is not collective: all ranks would have to replay a captured collective in
    # the same order. And not with recomputation, which changes the kernels of a forward.
    return (
        on_cuda
        and config.strategy_record.local_forward
        and not config.uses_axis("tp", "pp")
        and not config.ddp.sync_batchnorm
        and not config.ddp.find_unused_parameters
        and not config.exact
        and config.remat == "none"
    )


def capture_calls(model: nn.Module, config: RunConfig, runtime: Runtime, log_event: EventLogger) -> None:
    """Install graph capture around the (compiled) call of `model`, in place, if the configuration allows it."""
    link = graph_link(model, config, runtime, log_event)
    if link:
        # The chain inserts it outside torch.compile, so that compiled kernels are captured.
        CallChain.of(model).install("graph", link)


def graph_link(model: nn.Module, config: RunConfig, runtime: Runtime, log_event: EventLogger) -> GraphedCall | None:
    """Return a link that captures, for a call of `model` or of a function of it; None if nothing is captured."""
    # A SyncBatchNorm in the user's model is collective too.
    if config.graph == "auto" and any(map(is_synchronised, model.modules())):
        return None
    if not wants_graph(config, runtime):
        return None
    return GraphedCall(model, CudaDevice(runtime.device), config.graph is True, log_event)


def has_captures(model: nn.Module) -> bool:
    link = CallChain.of(model).find("graph")
    return isinstance(link, GraphedCall) and any(variant.capture for variant in link.variants.values())


def release_captures(model: nn.Module) -> None:
    """Free the memory of all captures now."""
    chain = CallChain.of(model)
    link = chain.find("graph")
    if isinstance(link, GraphedCall):
        # The model and its link reference each other, so otherwise the captures would live until a garbage collection.
        chain.remove("graph")
        link.variants.clear()


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

    name: str  # for the log
    training: bool  # called with gradients; graph=true requires that such a variant is captured
    calls: int = 0
    forwards: list[Timing] = field(default_factory=list)
    backwards: list[Timing] = field(default_factory=list)
    patterns: list[Pattern] = field(default_factory=list)  # the patterns of its backwards so far, without duplicates
    capture: Capture | None = None
    moves: int = 0
    refused: str | None = None  # the reason why it is not captured

    @property
    def ready(self) -> bool:
        return self.capture is not None and self.capture.compared


class GraphedCall(Link):
    """The link of a model's call chain that captures and replays. Calls without a capture go to `inner` unchanged.

    With `required` (graph=true) it is an error if a training call cannot be captured. Each decision is logged as
    `log_event("graph", call=..., reason=...)`.
    """

    def __init__(self, model: nn.Module, device: CudaDevice, required: bool, log_event: EventLogger):
        self.model = model
        self.device = device
        self.required = required
        self.log_event = log_event

        self.variants: dict[Hashable, Variant] = {}
        self._logged: set[tuple[str, str]] = set()
        self._inspect_model()

    def _inspect_model(self) -> None:
        # Not in every call, because walking the module tree takes longer than a replay saves. It is repeated before a
        # capture, since a submodule may have been replaced.
        self._modules = list(self.model.modules())
        self._attributes = AttributeWatch(self._modules)
        self._hooks = [getattr(module, name) for module in self._modules for name in HOOKS]
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Do not capture inside another tracer or in inference mode.
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or torch._C._len_torch_dispatch_stack():
            return self.inner(*args, **kwargs)

        try:
            tensors, spec = flatten((args, kwargs))
        except OpaqueValue as error:
            self._log_refusal(
                "calls with other arguments than tensors and plain values",
                f"among them {error}",
                torch.is_grad_enabled(),
            )
            return self.inner(*args, **kwargs)

        variant = self._find_variant(tensors, spec)
        if variant is None or variant.refused is not None:
            return self.inner(*args, **kwargs)

        # Capture after the warm-up and compare in the call after that.
        if not variant.ready:
            variant.calls += 1
            if variant.capture is not None:
                self._compare(variant, variant.capture, tensors, spec)
            elif variant.calls > WARMUP_CALLS:
                self._capture(variant, tensors, spec)

        # A capture may be ready and still not be usable in this call.
        capture = self._usable_capture(variant)
        if capture:
            return capture(tensors)
        if variant.refused is None and variant.calls <= WARMUP_CALLS:
            return self._timed_call(variant, args, kwargs)

        return self.inner(*args, **kwargs)

    # ---- variants ----

    def _find_variant(self, tensors: list[Tensor], spec: Hashable) -> Variant | None:
        """Return the variant of this call, and create it if it is new. Return None if there are too many."""
        key = self._key(tensors, spec)
        variant = self.variants.get(key)
        if variant is None and len(self.variants) >= MAX_VARIANTS:
            self._log_refusal(
                "further calls",
                f"the model was called in {MAX_VARIANTS} different ways already (shapes, arguments, attributes)",
                torch.is_grad_enabled(),
            )
        elif variant is None:
            variant = self.variants[key] = self._new_variant(tensors)

        return variant

    def _key(self, tensors: list[Tensor], spec: Hashable) -> Hashable:
        """Return a key of everything that determines which kernels a call launches."""
        # Attributes may have been added or deleted since the last call.
        self._attributes.refresh()

        grad = torch.is_grad_enabled()
        kind = self.device.type
        return (
            spec,
            # Whether an input requires a gradient matters only if gradients are computed at all.
            tuple((t.shape, t.dtype, grad and t.requires_grad) for t in tensors),
            grad,
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            any(self._hooks),
            # For every module, since a part may be in eval mode while the rest trains.
            tuple(module.training for module in self._modules),
            self._attributes.settings(),
        )

    def _new_variant(self, tensors: list[Tensor]) -> Variant:
        """Return a variant for a call with these input tensors. It may be refused at once."""
        mode = "training" if torch.is_grad_enabled() else "without gradients"
        shapes = ["x".join(map(str, t.shape)) or "1" for t in tensors[:4]]
        variant = Variant(f"{mode}, {' '.join(shapes)}", torch.is_grad_enabled())

        # A call that can never be captured is run eagerly from the start.
        unfit = [t for t in tensors if t.device.type != self.device.type or t.layout != torch.strided]
        if unfit:
            self._refuse(variant, f"an argument is on the {unfit[0].device.type}, or sparse")
        elif any(self._hooks):
            self._refuse(variant, "a module has hooks, which a replay would not call")

        return variant

    def _capture(self, variant: Variant, tensors: list[Tensor], spec: Hashable) -> None:
        """Capture the call, or refuse the variant. The call itself still runs eagerly after this."""
        self._inspect_model()
        make_trial = partial(TrialCall, self.inner, self._parameters, tensors, spec, self.device.type)

        # Check the cheap conditions first: a dry run costs two forwards and backwards.
        if variant.training and not variant.patterns:
            return self._refuse(variant, "no backward has reached its results")

        # graph=true captures regardless of the timing.
        if not self.required:
            host_s, device_s = self._seconds(variant)
            if host_s < LAUNCH_BOUND * device_s:
                return self._refuse(
                    variant,
                    f"not launch-bound: the host needs {host_s * 1e3:.2f} ms to launch the kernels, the device "
                    f"{device_s * 1e3:.2f} ms to run them",
                )

        # Each capture has its own memory for activations and gradients.
        if sum(other.capture is not None for other in self.variants.values()) >= MAX_CAPTURES:
            return self._refuse(variant, f"{MAX_CAPTURES} variants of the call are captured already")

        # Without gradients there is no backward. An empty pattern means the forward alone.
        patterns = variant.patterns or [()]
        reached, why = dry_run(make_trial, patterns, self.model, self.device)
        if why:
            return self._refuse(variant, why)

        # Capturing runs the call once, which must not change buffers or random number generators.
        with StateSnapshot(self.model, self.device.generator()):
            try:
                variant.capture = Capture(make_trial(), reached, patterns, self.device)
            except Exception as error:
                return self._refuse(variant, first_line(error))

        variant.capture.addresses = self._addresses()
        variant.capture.callables = self._attributes.callables()

    def _compare(self, variant: Variant, capture: Capture, tensors: list[Tensor], spec: Hashable) -> None:
        """Compare a replay with an eager call, on other arguments than those of the capture.

        With the same arguments, values that were computed on the host and baked into the capture would not differ.
        """
        # Compare every captured backward, each after its own forward.
        for pattern in capture.patterns:
            try:
                trial = TrialCall(self.inner, self._parameters, tensors, spec, self.device.type)
                why = compare(capture, trial, pattern, self.model, self.device)
            except Exception as error:
                why = first_line(error)

            if why:
                return self._refuse(variant, why)

        capture.compared = True

        times = ""
        if variant.forwards:
            host_s, device_s = self._seconds(variant)
            times = f"; before, the host needed {host_s * 1e3:.2f} ms, the device {device_s * 1e3:.2f} ms"

        self.log_event("graph", call=variant.name, reason=f"captured, and equal to an eager call{times}")

    # ---- is a capture still valid? ----

    def _usable_capture(self, variant: Variant) -> Capture | None:
        """Return the capture if this call may replay it. A capture that no longer fits is dropped."""
        capture = variant.capture
        if capture is None or not capture.compared:
            return None

        # A second forward would overwrite the activations that the pending backward needs.
        if capture.pending_backward() is not None:
            self._log_refusal(variant.name, "a second forward before the backward of the first one runs eagerly")
            return None

        if capture.unknown_pattern and len(variant.patterns) < MAX_PATTERNS:
            # Beyond the limit, the backward of all outputs is used for further patterns.
            variant.patterns.append(capture.unknown_pattern)
            self._capture_again(variant, "other results than before got gradients")
        elif capture.addresses != self._addresses():
            self._moved(variant, "a parameter, buffer or other tensor has moved in memory")
        elif not same_objects(capture.callables, self._attributes.callables()):
            self._moved(variant, "a submodule, or a function in an attribute of a module, was replaced")

        return variant.capture

    def _addresses(self) -> list[int]:
        # Comprehensions for speed, since this runs before every replay.
        named = [t for m in self._modules for tensors in (m._parameters, m._buffers) for t in tensors.values()]
        return [t.data_ptr() for t in [*named, *self._attributes.tensors()] if t is not None]

    def _moved(self, variant: Variant, event: str) -> None:
        """Capture again, unless this has happened too often: a capture must save more time than it takes."""
        variant.moves += 1

        # This also drops references to submodules that were replaced.
        self._inspect_model()
        if variant.moves > MAX_MOVES:
            self._refuse(variant, f"{event}, again and again")
        else:
            self._capture_again(variant, f"{event} (time {variant.moves})")

    def _capture_again(self, variant: Variant, why: str) -> None:
        """Drop the capture. The next call captures again, without another warm-up."""
        variant.capture = None
        variant.calls = WARMUP_CALLS
        self._log_once(variant.name, f"captured again: {why}")

    def _refuse(self, variant: Variant, why: str) -> None:
        variant.capture = None
        variant.refused = why
        self._log_refusal(variant.name, why, variant.training)

    def _log_refusal(self, call: str, why: str, training: bool = False) -> None:
        # An evaluation that cannot be captured is no reason to stop a run.
        if self.required and training:
            raise UserError(
                f"graph=true, but {type(self.model).__name__} cannot be captured ({call})", why, "set graph=auto"
            )

        self._log_once(call, f"not captured: {why}")

    def _log_once(self, call: str, reason: str) -> None:
        """Log a decision once, not in every step."""
        if (call, reason) not in self._logged:
            self._logged.add((call, reason))
            self.log_event("graph", call=call, reason=reason)

    # ---- timing of eager calls ----

    def _timed_call(self, variant: Variant, args: Any, kwargs: Any) -> Any:
        """Run the call eagerly, and time its forward and the backward that follows.

        The device is timed by events on its stream, so the host does not wait here.
        """
        begin_s = time.perf_counter()
        begin = self.device.record_event()
        result = self.inner(*args, **kwargs)

        # Do not count the first call, which compiles and allocates.
        if variant.calls > 1:
            variant.forwards.append(Timing(time.perf_counter() - begin_s, begin, self.device.record_event()))

        if not variant.training or variant.refused is not None:
            return result

        try:
            tensors, _ = flatten(result)
        except OpaqueValue as error:
            self._refuse(variant, f"it returns {error}")
            return result

        differentiable = [tensor for tensor in tensors if tensor.requires_grad]

        # If an output is also an input or a parameter, a replay would return a copy of it.
        if any(tensor.grad_fn is None for tensor in differentiable):
            self._refuse(variant, "it returns one of its arguments or parameters")
            return result

        # Hooks on the outputs show which of them get a gradient, and when the first gradient arrives.
        watch = _BackwardWatch(self.device, variant, len(differentiable), partial(self._refuse, variant))
        for index, tensor in enumerate(differentiable):
            tensor.register_hook(partial(watch.gradient_arrived, index))

        return result

    def _seconds(self, variant: Variant) -> tuple[float, float]:
        """Return the host's and the device's seconds of forward and backward. The host waits here."""
        host_s = device_s = 0.0
        # Take the fastest run, since the host may have been busy otherwise. Evaluations have no backward.
        for timings in filter(None, (variant.forwards, variant.backwards)):
            host_s += min(timing.host_s for timing in timings)
            device_s += min(self.device.elapsed_s(timing.begin, timing.end) for timing in timings)

        return host_s, device_s


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
