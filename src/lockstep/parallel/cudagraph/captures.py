"""One way of calling a model, recorded once and replayed: its forward, and its backward.

What is replayed works in memory of its own. So inputs are copied in, and results are copied out: a task may keep them
(the carry of a recurrent model), and torch may take a gradient that it is given for its own.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.errors import UserError
from lockstep.parallel.backward_graph import leaves_below, nodes_below
from lockstep.parallel.trees import Opaque, put_together, take_apart

Work = Callable[[], None]
Pattern = tuple[bool, ...]  # for every differentiable output of a call, whether a gradient arrives


class Device(Protocol):
    """What records work. The tests have one for CPUs, whose replay does the work again."""

    type: str

    def record(self, works: Iterable[Work]) -> list[Work]:
        """Go through each of `works` once, in order. What does the same again, in the same memory."""

    def strict(self) -> AbstractContextManager[Any]:
        """Inside, whatever makes the host wait for the device is an error."""

    def generator(self) -> torch.Generator:
        """Where the work draws its random numbers."""

    def mark(self) -> Any:
        """A moment in what the device does."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two marks. The host waits for the second."""


class CudaDevice:
    type = "cuda"

    def __init__(self, device: torch.device):
        self.device = device

    def record(self, works: Iterable[Work]) -> list[Work]:
        """In one pool of memory: the later ones read what the earlier ones leave. No other recording shares it, so
        recordings may be replayed in any order."""
        before = torch.cuda.current_stream(self.device)
        default = before == torch.cuda.default_stream(self.device)  # which cannot be recorded
        stream = torch.cuda.Stream(self.device) if default else before
        pool, graphs = torch.cuda.graph_pool_handle(), []
        collects = gc.isenabled()
        gc.collect()
        gc.disable()  # what is thrown away meanwhile may call CUDA in ways that spoil the recording
        try:
            for work in works:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    work()
                graphs.append(graph)
        except BaseException:
            self._come_back(pool, before, stream)
            raise
        finally:
            if collects:
                gc.enable()
        return [graph.replay for graph in graphs]

    @contextmanager
    def strict(self) -> Iterator[None]:
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(action="ignore"):  # that it does not notice everything
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def generator(self) -> torch.Generator:
        return torch.cuda.default_generators[self.device.index or 0]

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()  # host waits for the device: a few times in a run, when it is decided what to record
        return begin.elapsed_time(end) / 1000

    def _come_back(self, pool: Any, before: torch.cuda.Stream, stream: torch.cuda.Stream) -> None:
        """After a recording that broke off, torch leaves the stream, the allocator and the generator as in the midst of
        one. The generator comes out of it with another recording, which succeeds."""
        torch.cuda.set_stream(before)
        try:
            torch._C._cuda_endAllocateToPool(self.device.index or 0, pool)
        except RuntimeError:
            pass  # that far torch has come by itself
        torch.cuda.synchronize(self.device)
        numbers = torch.zeros(1, device=self.device)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            numbers.add_(1)


class Trip:
    """A call there and back, with inputs of its own. No gradient is left on any parameter."""

    def __init__(
        self,
        call: Callable[..., Any],
        parameters: list[nn.Parameter],
        tensors: Sequence[Tensor],
        rest: Hashable,
        device_type: str,
    ):
        self.call, self.rest, self.device_type = call, rest, device_type
        self.grad = torch.is_grad_enabled()
        self.inputs = [t.detach().clone().requires_grad_(self.grad and t.requires_grad) for t in tensors]
        self.parameters = parameters if self.grad else []
        self.sources: list[Tensor] = [*(t for t in self.inputs if t.requires_grad), *self.parameters]
        self.outputs: list[Tensor] = []
        self.result: Hashable = None
        self.keeps_arguments = True
        self.gradients: list[Tensor | None] = []  # of `sources`

    def forward(self) -> None:
        args, kwargs = put_together(self.inputs, self.rest)
        # Weights that autocast has converted outside are not looked up inside, nor the other way round.
        torch.clear_autocast_cache()
        with torch.set_grad_enabled(self.grad):
            self.outputs, self.result = take_apart(self.call(*args, **kwargs))
        torch.clear_autocast_cache()
        self.keeps_arguments = self._as_before(args, kwargs)

    def _as_before(self, args: Any, kwargs: Any) -> bool:
        """Whether the call has put nothing else into its arguments, as it does with a cache of keys and values."""
        try:
            tensors, rest = take_apart((args, kwargs))
        except Opaque:
            return False
        return rest == self.rest and all(a is b for a, b in zip(tensors, self.inputs, strict=True))

    @property
    def differentiable(self) -> list[Tensor]:
        return [output for output in self.outputs if output.requires_grad]

    def backward(self, starts: Sequence[Tensor | None], again: bool = False) -> None:
        """`starts`: the gradient of every differentiable output, None where none arrives. `again`: another one may
        follow."""
        pairs = [(o, s) for o, s in zip(self.differentiable, starts, strict=True) if s is not None]
        if not pairs:
            self.gradients = [None] * len(self.sources)
            return
        with torch.autocast(self.device_type, enabled=False):  # as the engine does it
            outputs, given = [o for o, _ in pairs], [s for _, s in pairs]
            self.gradients = list(torch.autograd.grad(outputs, self.sources, given, again, allow_unused=True))

    def reached(self) -> list[set[int]]:
        """For every differentiable output, the places of the sources below it. Between forward and backward."""
        places = {id(source): place for place, source in enumerate(self.sources)}
        below = [leaves_below([output.grad_fn]) for output in self.differentiable]
        return [{places[id(leaf)] for leaf in leaves if id(leaf) in places} for leaves in below]

    @property
    def compiled(self) -> bool:
        """Whether its backward has compiled parts, which run once only. Between forward and backward."""
        nodes = nodes_below(output.grad_fn for output in self.differentiable)
        return any(type(node).__name__.startswith("CompiledFunction") for node in nodes)


class Capture:
    """A recorded trip. `reached`: for every differentiable output, the places of the sources that its gradient goes to.
    What no gradient reaches has none then, not one of zeros.

    Every one of `patterns` has a backward of its own: where no gradient arrives, none goes back, since zeros would
    become nan at a node that gives inf. Patterns that were not seen before, and compiled models (which fill in zeros
    by themselves), go through one backward of all outputs, with zeros.
    """

    def __init__(self, trip: Trip, reached: Sequence[set[int]], patterns: Sequence[Pattern], device: Device):
        self._trip, self._reached = trip, reached
        self._everything: Pattern = (True,) * len(reached)
        self.patterns = [*(pattern for pattern in patterns if pattern != self._everything), self._everything]
        self._gradients: dict[Pattern, list[Tensor | None]] = {}  # of the sources, where each backward leaves them
        self._starts: list[Tensor] = []
        self._one_for_all = False
        self.strange: Pattern | None = None  # one that came, and has no backward of its own
        self._waiting: Callable[[], object] = lambda: None  # gives the ticket of a forward that waits for its backward
        self._wants = [t.requires_grad for t in trip.inputs]
        self._forward, *backwards = device.record(self._works())
        self._backwards = dict(zip(self._gradients, backwards, strict=True))

    def _works(self) -> Iterator[Work]:
        yield self._trip.forward
        if self._trip.grad:
            # Between two recordings, so that no replay fills them anew.
            self._starts = [torch.zeros_like(output) for output in self._trip.differentiable]
            self._one_for_all = self._trip.compiled
            for pattern in self.patterns[-1:] if self._one_for_all else self.patterns:
                starts = [start if given else None for start, given in zip(self._starts, pattern, strict=True)]
                yield partial(_go_back, self._trip, starts, pattern != self._everything, self._gradients, pattern)

    @property
    def waits(self) -> bool:
        """Another forward would overwrite what a backward, which may still come, needs of the last one."""
        return self._waiting() is not None

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        outputs = _Replay.apply(self, *tensors, *self._trip.parameters) if self._trip.grad else self.forward(tensors)
        return put_together(list(outputs), self._trip.result)

    def issue(self) -> _Ticket:
        ticket = _Ticket()
        self._waiting = weakref.ref(ticket)
        return ticket

    def redeem(self, ticket: _Ticket) -> None:
        if ticket.used:
            raise UserError(
                "backward() a second time through one forward of the model",
                "a recorded one (CUDA graph), which keeps nothing after the first",
                "add up the losses and go backward once, or type graph=false",
            )
        ticket.used, self._waiting = True, lambda: None

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            if tensors:
                torch._foreach_copy_(self._trip.inputs, [t.detach() for t in tensors])
            self._forward()
            return _copies(self._trip.outputs)

    @property
    def result(self) -> Hashable:
        """What comes back besides tensors."""
        return self._trip.result

    def fixed(self) -> list[bool]:
        """Which outputs have no gradient."""
        return [not output.requires_grad for output in self._trip.outputs]

    def backward(self, starts: Sequence[Tensor | None]) -> list[Tensor | None]:
        """`starts`: one for each differentiable output. A gradient for each source."""
        pattern = (*(start is not None for start in starts),)
        if pattern not in self._backwards:
            self.strange = None if self._one_for_all else pattern
            pattern = self._everything
        with torch.no_grad():
            for own, start in zip(self._starts, starts, strict=True):
                own.zero_() if start is None else own.copy_(start)
            self._backwards[pattern]()
            given = [places for places, start in zip(self._reached, starts, strict=True) if start is not None]
            live = {
                place: gradient
                for place, gradient in enumerate(self._gradients[pattern])
                if gradient is not None and any(place in places for places in given)
            }
            fresh = dict(zip(live, _copies(list(live.values())), strict=True))
        return [fresh.get(place) for place in range(len(self._trip.sources))]

    def arguments(self, found: list[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the sources, as gradients of all inputs and the parameters."""
        gradients = iter(found)
        return [next(gradients) if wants else None for wants in self._wants] + list(gradients)


def _go_back(
    trip: Trip, starts: list[Tensor | None], again: bool, left: dict[Pattern, list[Tensor | None]], pattern: Pattern
) -> None:
    """No method: what is recorded must not hold the Capture, or nobody would free it."""
    trip.backward(starts, again)
    left[pattern] = trip.gradients


class _Ticket:
    """Lives as long as somebody may still go backward."""

    def __init__(self) -> None:
        self.used = False


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, capture: Capture, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.capture, ctx.ticket = capture, capture.issue()
        ctx.set_materialize_grads(False)
        outputs = capture.forward(tensors[: len(capture._wants)])
        ctx.fixed = capture.fixed()
        ctx.mark_non_differentiable(*(o for o, fixed in zip(outputs, ctx.fixed, strict=True) if fixed))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        ctx.capture.redeem(ctx.ticket)
        starts = [gradient for gradient, fixed in zip(grad_outputs, ctx.fixed, strict=True) if not fixed]
        return None, *ctx.capture.arguments(ctx.capture.backward(starts))


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """In one go, where torch has a kernel for that."""
    fresh = [torch.empty_like(tensor) for tensor in tensors]
    if fresh:
        torch._foreach_copy_(fresh, [tensor.detach() for tensor in tensors])
    return fresh
