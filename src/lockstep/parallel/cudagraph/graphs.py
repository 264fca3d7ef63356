"""Capture the calls of a launch-bound model, whose kernels finish faster than the host launches them, and replay them.

We capture the model's forward and backward. `task.loss` may run arbitrary Python: it is captured only if it was
compiled as one graph, and only while all that it reads is unchanged (compiled/installed.py). Every variant of a call
(shapes, modes, other arguments) goes through the same stages: a few eager calls are timed, to see whether the device
waits for the host; then the call is tested, captured, and compared with an eager call; from then on it is replayed. If
a variant is not replayed, the reason is logged.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.parallel.calls.arguments import OpaqueValue, flatten
from lockstep.parallel.calls.chain import CallChain, Link
from lockstep.parallel.calls.state import StateSnapshot, TrialCall
from lockstep.parallel.cudagraph.capture import Capture
from lockstep.parallel.cudagraph.checks import compare, dry_run, first_line
from lockstep.parallel.cudagraph.device import CudaDevice
from lockstep.parallel.cudagraph.variants import ModelAttributes, RunLength, Variant, same_objects, timed_call
from lockstep.runtime.context import EventLogger, Runtime

WARMUP_CALLS = 5  # eager calls before a capture; the first ones compile, tune and allocate
LAUNCH_BOUND = 0.5  # a call is launch-bound if the host needs at least this fraction of the device's time to launch it
FEW_CAPTURES = 8  # so many captures are made whatever memory they take
MEMORY_SHARE = 0.15  # further ones are made while all of them together take at most this part of the device's memory
MAX_VARIANTS = 256  # the most variants of a call that are kept, with or without a capture
MAX_MOVES = 2  # how often tensors may move, or submodules be replaced, before a variant is no longer captured
MAX_PATTERNS = 6  # patterns of outputs with gradients per variant, each with its own backward
MODULE_HOOK_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class GraphedCall(Link):
    """The link of a model's call chain that captures and replays. Calls without a capture go to `inner` unchanged.

    With `required` (graph=true) it is an error if a training call cannot be captured. Each decision is logged as
    `log_event("graph", call=..., reason=...)`. Without a `length` every capture is expected to pay.
    """

    def __init__(
        self,
        model: nn.Module,
        device: CudaDevice,
        required: bool,
        log_event: EventLogger,
        length: RunLength | None = None,
    ):
        self.model = model
        self.device = device
        self.required = required
        self.log_event = log_event

        # graph=true captures whether it pays or not.
        self._length = None if required else length
        self._first_step = length.steps_done if length else 0
        self._capture_s: float | None = None  # seconds that the last capture took, with its comparison

        self.variants: dict[Hashable, Variant] = {}
        self._logged: set[tuple[str, str]] = set()
        self._inspect_model()

    def _inspect_model(self) -> None:
        """Note the modules, hooks and parameters of the model."""
        # Not in every call, because walking the module tree takes longer than a replay saves. It is repeated before a
        # capture, since a submodule may have been replaced.
        self._modules = list(self.model.modules())
        self._attributes = ModelAttributes(self._modules)
        self._hooks = [getattr(module, name) for module in self._modules for name in MODULE_HOOK_ATTRIBUTES]
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
        variant.all_calls += 1
        if not variant.ready:
            variant.calls += 1
            if variant.capture is not None:
                self._compare(variant, variant.capture, tensors, spec)
            elif variant.calls > WARMUP_CALLS and self._pays(variant):
                self._capture(variant, tensors, spec)

        # A capture may be ready and still not be usable in this call.
        capture = self._usable_capture(variant)
        if capture:
            return capture(tensors)

        # The first calls are timed, to find out whether the host or the device is the slower one.
        if variant.refused is None and variant.calls <= WARMUP_CALLS:
            refuse = partial(self._refuse, variant)
            return timed_call(lambda: self.inner(*args, **kwargs), variant, self.device, refuse)

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

        # The cheap conditions first: a dry run costs two forwards and backwards.
        why = self._reason_against(variant)
        if why:
            return self._refuse(variant, why)

        # Without gradients there is no backward. An empty pattern means the forward alone.
        make_trial = partial(TrialCall, self.inner, self._parameters, tensors, spec, self.device.type)
        patterns = variant.patterns or [()]
        began_s = time.perf_counter()
        reached, why = dry_run(make_trial, patterns, self.model, self.device)
        if why:
            return self._refuse(variant, why)

        # Capturing runs the call once, which must not change buffers or random number generators.
        with StateSnapshot(self.model, self.device.generator()):
            before = self.device.reserved_bytes()
            try:
                variant.capture = Capture(make_trial(), reached, patterns, self.device)
            except Exception as error:
                return self._refuse(variant, first_line(error))

        variant.capture.bytes = self.device.reserved_bytes() - before
        variant.capture.seconds = time.perf_counter() - began_s
        variant.capture.addresses = self._addresses()
        variant.capture.callables = self._attributes.callables()

    def _reason_against(self, variant: Variant) -> str | None:
        """Return why a variant should not be captured, from what its first calls have shown, or None."""
        if variant.training and not variant.patterns:
            return "no backward has reached its results"

        # graph=true captures regardless of the timing.
        if not self.required:
            host_s, device_s = variant.seconds(self.device)
            if host_s < LAUNCH_BOUND * device_s:
                return (
                    f"not launch-bound: the host needs {host_s * 1e3:.2f} ms to launch the kernels, the device "
                    f"{device_s * 1e3:.2f} ms to run them"
                )

        # Each capture has its own memory for activations and gradients.
        captures = [other.capture for other in self.variants.values() if other.capture]
        share = sum(capture.bytes for capture in captures) / self.device.total_bytes()
        if len(captures) >= FEW_CAPTURES and share > MEMORY_SHARE:
            return f"{len(captures)} captures of other variants take {share:.0%} of the device's memory"

        return None

    def _pays(self, variant: Variant) -> bool:
        """Return whether a capture of this variant is expected to save more time than it takes."""
        if self._length is None:
            return True

        # The rest of the run is expected to make this call as often as it did so far.
        steps = self._length.steps_done - self._first_step
        return variant.pays(steps, self._length.steps_left, self._capture_s)

    def _compare(self, variant: Variant, capture: Capture, tensors: list[Tensor], spec: Hashable) -> None:
        """Compare a replay with an eager call, on other arguments than those of the capture.

        With the same arguments, values that were computed on the host and baked into the capture would not differ.
        """
        # Compare every captured backward, each after its own forward.
        began_s = time.perf_counter()
        for pattern in capture.patterns:
            try:
                trial = TrialCall(self.inner, self._parameters, tensors, spec, self.device.type)
                why = compare(capture, trial, pattern, self.model, self.device)
            except Exception as error:
                why = first_line(error)

            if why:
                return self._refuse(variant, why)

        capture.compared = True
        self._capture_s = capture.seconds + time.perf_counter() - began_s

        times = ""
        if variant.forwards:
            host_s, device_s = variant.seconds(self.device)
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
        """Return where the tensors of the model are in memory: a replay reads them there."""
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
        """Run this variant eagerly from now on."""
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


# ---- the link around a model ----


def wants_graph(config: RunConfig, runtime: Runtime) -> bool:
    """Whether to capture calls where forwards are not collective (`RankRole.collective_forwards`)."""
    if config.graph is True and not runtime.on_gpu:
        raise UserError(
            f"graph=true needs a GPU; the device is {runtime.device.type}",
            "CUDA graphs are for GPUs",
            "leave graph out",
        )

    if config.graph != "auto":
        return config.graph

    # Not with recomputation, which changes the kernels of a forward. config/conflicts.py refuses graph=true with these.
    return runtime.on_gpu and not config.ddp.find_unused_parameters and not config.exact and config.remat == "none"


def capture_calls(
    model: nn.Module, config: RunConfig, runtime: Runtime, log_event: EventLogger, length: RunLength | None = None
) -> None:
    """Install graph capture around the (compiled) call of `model`, in place, if the configuration allows it.

    Not for collective forwards: all ranks would have to replay a captured collective in the same order.
    """
    link = graph_link(model, config, runtime, log_event, length)
    if link:
        # The chain inserts it outside torch.compile, so that compiled kernels are captured.
        CallChain.of(model).install("graph", link)


def graph_link(
    model: nn.Module, config: RunConfig, runtime: Runtime, log_event: EventLogger, length: RunLength | None = None
) -> GraphedCall | None:
    """Return a link that captures, for a call of `model` or of a function of it; None if nothing is captured."""
    if not wants_graph(config, runtime):
        return None

    return GraphedCall(model, CudaDevice(runtime.device), config.graph is True, log_event, length)


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
