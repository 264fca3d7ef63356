"""One captured forward of a model with its backwards, as a differentiable function.

A replay always works in the same memory. So inputs are copied in and results are copied out: a task may keep the
results (the carry of a recurrent model), and autograd may take ownership of a gradient that it gets.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.parallel.call_arguments import unflatten
from lockstep.parallel.call_state import Pattern, TrialCall
from lockstep.parallel.cudagraph.device import CudaDevice, Work


class Capture:
    """A captured trial call.

    Each of `patterns` has its own backward: an output without a gradient passes none on, since zeros would become NaN
    at a node whose derivative is infinite. A pattern without its own backward, and every pattern of a compiled model
    (which fills in zeros by itself), uses the backward of all outputs, with zeros.
    """

    def __init__(self, trial: TrialCall, reached: Sequence[set[int]], patterns: Sequence[Pattern], device: CudaDevice):
        """Capture the forward of `trial`, and a backward for each of `patterns`.

        `reached` holds for each differentiable output the indices of the sources that its gradient reaches. A source
        that no given gradient reaches gets none, rather than one of zeros: an optimizer would step on zeros.
        """
        self.trial = trial
        self._reached = reached
        self._all: Pattern = (True,) * len(reached)

        # The pattern of all outputs comes last; it is always captured.
        self.patterns = [*(pattern for pattern in patterns if pattern != self._all), self._all]
        self.unknown_pattern: Pattern | None = None  # one that arrived and does not have its own backward

        # Returns the ticket of a forward whose backward may still come: another forward would overwrite what it needs.
        self.pending_backward: Callable[[], object] = lambda: None

        # What a replay relies on; GraphedCall sets and checks it.
        self.compared = False  # with a plain call
        self.addresses: list[int] = []  # of the tensors that it reads in place
        self.callables: list[Any] = []  # submodules and functions at the time of the capture

        # Before the forward runs, which may call requires_grad_() on an input.
        self.wants_gradient = [t.requires_grad for t in trial.inputs]

        # The trial has its gradients by pattern, in the order of their captures.
        self._forward, *backwards = device.capture(self._works())
        self._backwards = dict(zip(trial.gradients, backwards, strict=True))

    def _works(self) -> Iterator[Work]:
        """Yield the forward, then the backwards. The device runs each one before it asks for the next.

        They refer to the trial, never to the Capture: a reference cycle would keep its memory alive.
        """
        yield self.trial.forward
        if not self.trial.grad:
            return

        # The backwards read this memory. It is allocated between two captures, so that no replay writes into it.
        self._grad_outputs = [torch.zeros_like(output) for output in self.trial.differentiable]
        self._single_backward = self.trial.has_compiled_backward
        for pattern in [self._all] if self._single_backward else self.patterns:
            starts = [start if arrives else None for start, arrives in zip(self._grad_outputs, pattern, strict=True)]
            # The backward of all outputs is the last one and may free the graph.
            yield partial(self.trial.backward, starts, retain_graph=pattern != self._all)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Replay the call on its flattened arguments and return what the model would return."""
        if self.trial.grad:
            # Parameters are arguments, so that autograd connects their gradients.
            outputs = list(_Replay.apply(self, *tensors, *self.trial.parameters))
        else:
            outputs = self.forward(tensors)

        return unflatten(outputs, self.trial.output_spec)

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Replay the forward on `tensors`, shaped like the captured inputs, and return copies of the outputs."""
        with torch.no_grad():
            # torch refuses an empty list.
            if tensors:
                torch._foreach_copy_(self.trial.inputs, [t.detach() for t in tensors])

            self._forward()
            return _copies(self.trial.outputs)

    def backward(self, grad_outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay a backward: one gradient (or None) per differentiable output in, one per source out."""
        pattern = tuple(gradient is not None for gradient in grad_outputs)
        if pattern not in self._backwards:
            # GraphedCall captures again with this pattern.
            self.unknown_pattern = None if self._single_backward else pattern
            pattern = self._all

        # The backward of all outputs computes zeros for sources that no given gradient reaches: these are left out.
        reached: set[int] = set()
        with torch.no_grad():
            for start, gradient, sources in zip(self._grad_outputs, grad_outputs, self._reached, strict=True):
                if gradient is None:
                    start.zero_()
                else:
                    start.copy_(gradient)
                    reached |= sources

            self._backwards[pattern]()

            gradients = self.trial.gradients[pattern]
            live = {n: g for n, g in enumerate(gradients) if g is not None and n in reached}
            fresh = dict(zip(live, _copies(list(live.values())), strict=True))

        return [fresh.get(number) for number in range(len(gradients))]


class _Ticket:
    """Lives as long as a backward through one forward is still possible: autograd's context holds it."""


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, capture: Capture, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`tensors` are the inputs, then the parameters (autograd must know them; the replay reads them in place)."""
        ctx.capture = capture
        ctx.ticket = _Ticket()
        capture.pending_backward = weakref.ref(ctx.ticket)

        # None stays None, instead of zeros: see Capture.
        ctx.set_materialize_grads(False)
        outputs = capture.forward(tensors[: len(capture.trial.inputs)])

        ctx.fixed = [not output.requires_grad for output in capture.trial.outputs]
        ctx.mark_non_differentiable(*(o for o, fixed in zip(outputs, ctx.fixed, strict=True) if fixed))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        # Not torch's `once_differentiable`: it lets a second derivative through, as zero, if no gradient that arrives
        # here requires one itself. That is so in every gradient penalty.
        if torch.is_grad_enabled():
            raise UserError(
                "a gradient was taken with create_graph=True through a model that runs as a CUDA graph",
                "a replayed backward cannot be differentiated again",
                "type graph=false",
            )
        if ctx.ticket is None:
            raise UserError(
                "backward() was called twice through one forward of a model that runs as a CUDA graph",
                "a replay keeps nothing after the first backward",
                "add up the losses and call backward() once, or type graph=false",
            )
        ctx.ticket = None

        # autograd passes a gradient for every output, None for those without.
        starts = [gradient for gradient, fixed in zip(grad_outputs, ctx.fixed, strict=True) if not fixed]
        gradients = iter(ctx.capture.backward(starts))
        # Sources are the inputs that require a gradient, then all parameters.
        of_inputs = [next(gradients) if wanted else None for wanted in ctx.capture.wants_gradient]
        return None, *of_inputs, *gradients


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copy all tensors with one kernel, where torch has one for that."""
    fresh = [torch.empty_like(tensor) for tensor in tensors]
    if fresh:
        torch._foreach_copy_(fresh, [tensor.detach() for tensor in tensors])

    return fresh
