"""A launch-bound model is recorded and replayed (CUDA graphs): a small one, whose kernels end sooner than the host can
hand them out.

Recorded is a call of the model, its forward and its backward, never the task's loss, which may do anything in Python.
Every way of calling it (shapes, modes, other arguments) goes through the same: a few calls are watched, which tell
whether the host is what the device waits for; then the call is rehearsed, recorded, and compared with a plain one; from
then on it is replayed. What is not replayed is told, with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.parallel.attributes import Held, same_objects
from lockstep.parallel.cudagraph.captures import Capture, CudaDevice, Device, Pattern, Trip
from lockstep.parallel.cudagraph.rehearsal import compare, first_line, rehearse
from lockstep.parallel.surroundings import SourceContext
from lockstep.parallel.trees import Opaque, take_apart
from lockstep.runtime.context import Runtime

WATCHED = 5  # calls that run plainly; the first ones compile, tune and allocate
LAUNCH_BOUND = 0.7  # of the device's time: so long does the host take to hand out the work, or longer
MOST_RECORDED = 8
MOST_KNOWN = 64  # ways of calling that are told apart at all
MOST_MOVES = 2  # of tensors in memory, or other parts, before nothing is recorded any more
MOST_PATTERNS = 6  # sets of results that gradients come back to, each with a backward of its own

Tell = Callable[..., None]


def wants_graph(config: RunConfig, runtime: Runtime) -> bool:
    """What `graph` comes to here. Settings that never go with it are refused in config/conflicts.py."""
    if config.graph is True and runtime.device.type != "cuda":
        raise UserError(
            "graph=true", f"{runtime.device.type} as the device; CUDA graphs are for GPUs", "leave graph out"
        )
    if config.graph != "auto":
        return config.graph
    plain = config.strategy in ("ddp", "zero1") and (config.mesh.tp or 1) == 1 and (config.mesh.pp or 1) == 1
    waits = config.ddp.sync_batchnorm or config.ddp.find_unused_parameters
    return runtime.device.type == "cuda" and plain and not waits and not config.exact and config.remat == "none"


def record_calls(model: nn.Module, config: RunConfig, runtime: Runtime, tell: Tell) -> None:
    """In place, around what is compiled: names stay, and the model's own methods do."""
    if wants_graph(config, runtime):
        call = model._compiled_call_impl or model._call_impl
        model._compiled_call_impl = Graphs(model, call, CudaDevice(runtime.device), config.graph is True, tell)


def has_recordings(model: nn.Module) -> bool:
    """Whether some memory is taken by them now."""
    call = model._compiled_call_impl
    return isinstance(call, Graphs) and any(way.capture for way in call.ways.values())


def forget_recordings(model: nn.Module) -> None:
    """Free their memory now: the model and what records its calls hold each other, until somebody looks for that."""
    call = model._compiled_call_impl
    if isinstance(call, Graphs):
        model._compiled_call_impl = None if call.call == model._call_impl else call.call
        call.ways.clear()


@dataclass
class Stretch:
    """How long the host took to hand out some work, and the device to do it: the least of several times."""

    host: float = float("inf")
    marks: list[tuple[Any, Any]] = field(default_factory=list)

    def add(self, host: float, begin: Any, end: Any) -> None:
        self.host = min(self.host, host)
        self.marks.append((begin, end))


@dataclass
class Way:
    """One way of calling the model."""

    name: str
    calls: int = 0
    moves: int = 0
    there: Stretch = field(default_factory=Stretch)
    back: Stretch = field(default_factory=Stretch)
    patterns: list[Pattern] = field(default_factory=list)  # to which results gradients came back, each way once
    capture: Capture | None = None
    addresses: list[int] = field(default_factory=list)
    parts: list[Any] = field(default_factory=list)  # of the model, as they were recorded
    ready: bool = False
    plain: str | None = None  # why it is not recorded
    told_waiting: bool = False


class Graphs:
    """Stands where torch looks for the compiled call of a module. `call`: what was there."""

    def __init__(self, model: nn.Module, call: Callable[..., Any], device: Device, required: bool, tell: Tell):
        self.model, self.call, self.device, self.required, self.tell = model, call, device, required, tell
        self.ways: dict[Hashable, Way] = {}
        self._told: set[tuple[str, str]] = set()
        self._look()

    def _look(self) -> None:
        """At the model as it is now: a part may have been replaced since."""
        self._modules = list(self.model.modules())
        self._held = Held(self._modules)
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        self._hooks = [getattr(module, name) for module in self._modules for name in hooks]
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or torch._C._len_torch_dispatch_stack():
            return self.call(*args, **kwargs)
        try:
            tensors, rest = take_apart((args, kwargs))
        except Opaque as error:
            call = "calls with other arguments than tensors and plain values"
            self._say(call, f"among them {error}", training=torch.is_grad_enabled())
            return self.call(*args, **kwargs)
        key = self._key(tensors, rest)
        way = self.ways.get(key)
        if way is None:
            if len(self.ways) >= MOST_KNOWN:
                why = f"the model was called in {MOST_KNOWN} different ways already (shapes, arguments, attributes)"
                self._say("further calls", why, training=torch.is_grad_enabled())
                return self.call(*args, **kwargs)
            way = self.ways[key] = self._first(tensors)
        if not way.ready and way.plain is None:
            self._advance(way, tensors, rest)
        if way.ready and self._fits(way):
            assert way.capture is not None
            return way.capture(tensors)
        if way.plain is None and way.calls <= WATCHED:
            return self._watched(way, args, kwargs)
        return self.call(*args, **kwargs)

    def _key(self, tensors: list[Tensor], rest: Hashable) -> Hashable:
        self._held.look()
        grad, kind = torch.is_grad_enabled(), self.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        shapes = (*((t.shape, t.dtype, grad and t.requires_grad) for t in tensors),)
        training = (*(module.training for module in self._modules),)
        return rest, shapes, grad, autocast, any(self._hooks), training, self._held.settings()

    def _first(self, tensors: list[Tensor]) -> Way:
        mode = "training" if torch.is_grad_enabled() else "without gradients"
        way = Way(f"{mode}, " + " ".join("x".join(map(str, t.shape)) or "1" for t in tensors[:4]))
        elsewhere = [t for t in tensors if t.device.type != self.device.type or t.layout != torch.strided]
        if elsewhere:
            self._refuse(way, f"an argument is on the {elsewhere[0].device.type}, or sparse")
        elif any(self._hooks):
            self._refuse(way, "a module has hooks, which a replay would not call")
        return way

    def _advance(self, way: Way, tensors: list[Tensor], rest: Hashable) -> None:
        """One call further. Whatever runs here leaves no trace but the recording."""
        way.calls += 1
        if way.calls == WATCHED + 1:
            self._record(way, tensors, rest)
        elif way.calls > WATCHED + 1:
            self._compare(way, tensors, rest)

    def _record(self, way: Way, tensors: list[Tensor], rest: Hashable) -> None:
        grad = torch.is_grad_enabled()
        self._look()
        make = partial(Trip, self.call, self._parameters, tensors, rest, self.device.type)
        if grad and not way.patterns:
            return self._refuse(way, "no gradient came back to its results")
        if not self.required and (bound := self._bound(way)):
            return self._refuse(way, bound)
        if sum(other.capture is not None for other in self.ways.values()) >= MOST_RECORDED:
            return self._refuse(way, f"{MOST_RECORDED} ways of calling the model are recorded already")
        patterns = way.patterns or [()]
        reached, why = rehearse(make, patterns, self.model, self.device)
        if why:
            return self._refuse(way, why)
        with SourceContext(self.model, self.device.generator()):
            try:
                way.capture = Capture(make(), reached, patterns, self.device)
            except Exception as error:
                return self._refuse(way, first_line(error))
        way.addresses, way.parts = self._addresses(), self._held.parts()

    def _compare(self, way: Way, tensors: list[Tensor], rest: Hashable) -> None:
        """With the next call's arguments: not those that it was recorded with."""
        assert way.capture is not None
        make = partial(Trip, self.call, self._parameters, tensors, rest, self.device.type)
        for pattern in way.capture.patterns:
            try:
                why = compare(way.capture, make(), pattern, self.model, self.device)
            except Exception as error:
                why = first_line(error)
            if why:
                return self._refuse(way, why)
        way.ready = True
        self.tell("graph", call=way.name, reason=f"recorded, and equal to a plain call{self._times(way)}")

    def _bound(self, way: Way) -> str | None:
        """Why recording would gain nothing."""
        host, device = self._seconds(way)
        if host >= LAUNCH_BOUND * device:
            return None
        return (
            f"not launch-bound: the host hands out in {host * 1e3:.2f} ms what takes the device {device * 1e3:.2f} ms"
        )

    def _times(self, way: Way) -> str:
        if not way.there.marks:
            return ""
        host, device = self._seconds(way)
        return f"; before, the host needed {host * 1e3:.2f} ms, the device {device * 1e3:.2f} ms"

    def _seconds(self, way: Way) -> tuple[float, float]:
        """The host's and the device's, of forward and backward."""
        stretches = [stretch for stretch in (way.there, way.back) if stretch.marks]
        device = sum(min(self.device.seconds(*marks) for marks in stretch.marks) for stretch in stretches)
        return sum(stretch.host for stretch in stretches), device

    def _fits(self, way: Way) -> bool:
        """Whether this call may be the recorded one."""
        assert way.capture is not None
        if way.capture.waits:
            if not way.told_waiting:
                way.told_waiting = True
                self._say(way.name, "a second forward before the backward of the first one runs plainly")
            return False
        if way.capture.strange and len(way.patterns) < MOST_PATTERNS:  # of further ones the backward of all takes care
            way.patterns.append(way.capture.strange)
            self._drop(way, "gradients came back to other results than before")
        elif way.addresses != self._addresses():
            self._moved(way, "a parameter, buffer or other tensor has moved in memory")
        elif not same_objects(way.parts, self._held.parts()):
            self._moved(way, "a part of the model, or a function that it keeps, is another one")
        return way.ready

    def _moved(self, way: Way, what: str) -> None:
        way.moves += 1
        self._look()  # and let go of what is no longer there
        if way.moves > MOST_MOVES:
            self._refuse(way, f"{what}, again and again")
        else:
            self._drop(way, f"{what} (time {way.moves})")

    def _drop(self, way: Way, why: str) -> None:
        """What was recorded is of no use any more."""
        way.calls, way.ready, way.capture, way.parts = WATCHED, False, None, []
        self._tell_once(way.name, f"recorded anew: {why}")

    def _addresses(self) -> list[int]:
        tensors = [t for m in self._modules for held in (m._parameters, m._buffers) for t in held.values()]
        return [t.data_ptr() for t in [*tensors, *self._held.tensors()] if isinstance(t, Tensor)]

    def _refuse(self, way: Way, why: str) -> None:
        way.plain, way.capture, way.ready, way.parts = why, None, False, []
        self._say(way.name, why, training=way.name.startswith("training"))

    def _say(self, call: str, why: str, training: bool = False) -> None:
        """`training`: whether this is a call that graph=true wants to have recorded."""
        if self.required and training:
            raise UserError("graph=true", f"{type(self.model).__name__} ({call}): {why}", "type graph=auto")
        self._tell_once(call, f"not recorded: {why}")

    def _tell_once(self, call: str, reason: str) -> None:
        if (call, reason) not in self._told:
            self._told.add((call, reason))
            self.tell("graph", call=call, reason=reason)

    # ---- watching plain calls ----

    def _watched(self, way: Way, args: Any, kwargs: Any) -> Any:
        begin, mark = time.perf_counter(), self.device.mark()
        result = self.call(*args, **kwargs)
        if way.calls > 1:
            way.there.add(time.perf_counter() - begin, mark, self.device.mark())
        if not torch.is_grad_enabled() or way.plain is not None:
            return result
        try:
            tensors, _ = take_apart(result)
        except Opaque as error:
            self._refuse(way, f"it returns {error}")
            return result
        live = [tensor for tensor in tensors if tensor.requires_grad]
        if any(tensor.grad_fn is None for tensor in live):
            self._refuse(way, "it returns one of its arguments or parameters")
            return result
        watch = _Backward(self.device, way, len(live))
        for place, tensor in enumerate(live):
            tensor.register_hook(partial(watch.arrived, place))
        return result


class _Backward:
    """One backward of a watched call: which results get a gradient, and how long it takes from the first one on."""

    def __init__(self, device: Device, way: Way, results: int):
        self._device, self._way = device, way
        self._timed, self._running = way.calls > 1, False
        self._given = [False] * results

    def arrived(self, place: int, gradient: Tensor | None) -> None:
        if gradient is None:  # one of several results of the same node, and none came back to this one
            return
        self._given[place] = True
        if not self._running:
            self._running = True
            self._begin, self._mark = time.perf_counter(), self._device.mark()
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        if self._timed:
            self._way.back.add(time.perf_counter() - self._begin, self._mark, self._device.mark())
        if self._way.patterns and len(self._way.patterns[0]) != len(self._given):
            self._way.patterns = []  # it returns other results than before
        if (pattern := tuple(self._given)) not in self._way.patterns:
            self._way.patterns.append(pattern)
