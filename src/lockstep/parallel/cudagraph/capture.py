"""One captured forward of a model with its backwards, as a differentiable function.

A replay works in memory of its own. So inputs are copied in and results are copied out: a task may keep the results
(the carry of a recurrent model), and autograd may take ownership of a gradient that it is given.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.errors import UserError
from lockstep.parallel.call_arguments import unflatten
from lockstep.parallel.call_state import TrialCall
from lockstep.parallel.cudagraph.device import Device, Work

Pattern = tuple[bool, ...]  # for every differentiable output of a call, whether a gradient arrives


class Capture:
    """A captured trial call.

    Each of `patterns` has a backward of its own: where no gradient arrives, none goes on, since zeros would become NaN
    at a node whose derivative is infinite. A pattern without its own backward, and every pattern of a compiled model
    (which fills in zeros by itself), uses the backward of all outputs, with zeros.
    """

    def __init__(self, trial: TrialCall, reached: Sequence[set[int]], patterns: Sequence[Pattern], device: Device):
        """Capture the forward of `trial`, and a backward for each of `patterns`.

        `reached` holds for each differentiable output the indices of the sources that its gradient reaches. A source
        that no given gradient reaches gets none, rather than one of zeros: an optimizer would step on zeros.
        """
        self._trial = trial
        self._reached = reached
        self._all: Pattern = (True,) * len(reached)
        # The pattern of all outputs comes last; it is always captured.
        self.patterns = [*(pattern for pattern in patterns if pattern != self._all), self._all]
        self.unknown_pattern: Pattern | None = None  # one that arrived and has no backward of its own

        # Fixed memory: what backwards read, and where each one leaves the gradients of the sources.
        self._grad_outputs: list[Tensor] = []
        self._gradients: dict[Pattern, list[Tensor | None]] = {}
        self._single_backward = False

        # Returns the ticket of a forward whose backward may still come.
        self._open_ticket: Callable[[], object] = lambda: None
        self._wants_gradient = [t.requires_grad for t in trial.inputs]

        # The keys of _gradients are the patterns in the order of their captures.
        self._forward, *backwards = device.capture(self._works())
        self._backwards = dict(zip(self._gradients, backwards, strict=True))

    def _works(self) -> Iterator[Work]:
        """Yield the forward, then the backwards. The device runs each one before it asks for the next."""
        yield self._trial.forward
        if not self._trial.grad:
            return

        # Allocated between two captures, so that no replay writes into them.
        self._grad_outputs = [torch.zeros_like(output) for output in self._trial.differentiable]
        self._single_backward = self._trial.has_compiled_backward
        patterns = self.patterns[-1:] if self._single_backward else self.patterns

        for pattern in patterns:
            given = [start if arrives else None for start, arrives in zip(self._grad_outputs, pattern, strict=True)]
            # The backward of all outputs is the last one, and may free the graph.
            retain_graph = pattern != self._all
            yield partial(_run_backward, self._trial, given, retain_graph, self._gradients, pattern)

    @property
    def awaits_backward(self) -> bool:
        """Whether another forward would overwrite what a backward that may still come needs."""
        return self._open_ticket() is not None

    @property
    def output_spec(self) -> Hashable:
        """What the call returns besides tensors."""
        return self._trial.output_spec

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Replay the call on its flattened arguments, and return what the model would return."""
        if self._trial.grad:
            # Parameters are arguments, so that autograd connects their gradients.
            outputs = list(_Replay.apply(self, *tensors, *self._trial.parameters))
        else:
            outputs = self.forward(tensors)
        return unflatten(outputs, self._trial.output_spec)

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Replay the forward on `tensors`, shaped like the captured inputs, and return copies of the outputs."""
        with torch.no_grad():
            if tensors:
                torch._foreach_copy_(self._trial.inputs, [t.detach() for t in tensors])
            self._forward()
            return _copies(self._trial.outputs)

    def backward(self, grad_outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay a backward: one gradient (or None) per differentiable output in, one per source out."""
        pattern = tuple(gradient is not None for gradient in grad_outputs)
        if pattern not in self._backwards:
            # GraphedCall captures again with this pattern.
            self.unknown_pattern = None if self._single_backward else pattern
            pattern = self._all

        with torch.no_grad():
            for own, gradient in zip(self._grad_outputs, grad_outputs, strict=True):
                if gradient is None:
                    own.zero_()
                else:
                    own.copy_(gradient)

            self._backwards[pattern]()

            # The backward of all outputs computes zeros for sources that no given gradient reaches: leave these out.
            reached: set[int] = set()
            for sources, gradient in zip(self._reached, grad_outputs, strict=True):
                if gradient is not None:
                    reached |= sources

            live = {n: g for n, g in enumerate(self._gradients[pattern]) if g is not None and n in reached}
            fresh = dict(zip(live, _copies(list(live.values())), strict=True))

        return [fresh.get(number) for number in range(len(self._trial.sources))]

    # ---- for _Replay ----

    def non_differentiable(self) -> list[bool]:
        """Return for each output whether it has no gradient."""
        return [not output.requires_grad for output in self._trial.outputs]

    def gradients_of_arguments(self, of_sources: list[Tensor | None]) -> list[Tensor | None]:
        """Spread the gradients of the sources over all inputs and parameters."""
        # Sources are the inputs that require a gradient, then all parameters.
        gradients = iter(of_sources)
        of_inputs = [next(gradients) if wants else None for wants in self._wants_gradient]
        return of_inputs + list(gradients)

    def issue_ticket(self) -> _Ticket:
        """Return a ticket that autograd's context holds; when the outputs are gone, so is the ticket."""
        ticket = _Ticket()
        self._open_ticket = weakref.ref(ticket)
        return ticket

    def redeem(self, ticket: _Ticket) -> None:
        """Allow one backward per forward."""
        if ticket.used:
            raise UserError(
                "backward() was called twice through one forward of a model that runs as a CUDA graph",
                "a replay keeps nothing after the first backward",
                "add up the losses and call backward() once, or type graph=false",
            )

        ticket.used = True
        self._open_ticket = lambda: None


def _run_backward(
    trial: TrialCall,
    grad_outputs: list[Tensor | None],
    retain_graph: bool,
    gradients: dict[Pattern, list[Tensor | None]],
    pattern: Pattern,
) -> None:
    """Not a method: captured work must not refer to the Capture, or a reference cycle would keep its memory."""
    trial.backward(grad_outputs, retain_graph)
    gradients[pattern] = trial.gradients


class _Ticket:
    """Lives as long as a backward through one forward is still possible."""

    def __init__(self) -> None:
        self.used = False


class _Replay(torch.autograd.Function):
    """A replayed forward whose backward replays too."""

    @staticmethod
    def forward(ctx: Any, capture: Capture, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`tensors` are the inputs, then the parameters (autograd must know them; the replay reads them in place)."""
        ctx.capture = capture
        ctx.ticket = capture.issue_ticket()
        # None stays None, instead of zeros: see Capture.
        ctx.set_materialize_grads(False)
        outputs = capture.forward(tensors[: len(capture._wants_gradient)])

        ctx.fixed = capture.non_differentiable()
        ctx.mark_non_differentiable(*(o for o, fixed in zip(outputs, ctx.fixed, strict=True) if fixed))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        ctx.capture.redeem(ctx.ticket)
        # autograd passes a gradient for every output, None for those without.
        given = [gradient for gradient, fixed in zip(grad_outputs, ctx.fixed, strict=True) if not fixed]
        return None, *ctx.capture.gradients_of_arguments(ctx.capture.backward(given))


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copy all tensors with one kernel, where torch has one for that."""
    fresh = [torch.empty_like(tensor) for tensor in tensors]
    if fresh:
        torch._foreach_copy_(fresh, [tensor.detach() for tensor in tensors])
    return fresh
