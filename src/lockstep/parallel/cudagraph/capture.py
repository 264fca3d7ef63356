"""One captured forward of a model with its backwards, as a differentiable function.

A replay always uses the same memory. So inputs are copied in and results are copied out: a task may keep the results
(the state of a recurrent model), and autograd may take ownership of a gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.parallel.calls.arguments import unflatten
from lockstep.parallel.calls.state import Pattern, TrialCall
from lockstep.parallel.cudagraph.device import CudaDevice, Work


class Capture:
    """A captured trial call.

    A pattern says which outputs get a gradient. Each of `patterns` has its own backward: zeros in the place of a
    missing gradient would become NaN at a node whose derivative is infinite. All other patterns use the backward of all
    outputs, with zeros. So does every pattern of a compiled model, which fills in zeros itself.
    """

    def __init__(self, trial: TrialCall, reached: Sequence[set[int]], patterns: Sequence[Pattern], device: CudaDevice):
        """Capture the forward of `trial`, and a backward for each of `patterns`.

        The sources are the inputs that require a gradient, then all parameters. `reached` holds, for each
        differentiable output, the indices of the sources that it depends on. A source that gets no gradient through any
        output gets None rather than zeros, with which an optimizer would step.
        """
        self.trial = trial
        self._reached = reached
        self._all: Pattern = (True,) * len(reached)

        # The pattern of all outputs is always captured, as the last one.
        self.patterns = [*(pattern for pattern in patterns if pattern != self._all), self._all]
        self.unknown_pattern: Pattern | None = None  # a pattern that occurred and does not have its own backward

        # Returns the ticket of a forward whose backward has not run yet, or None. A second forward would overwrite the
        # activations that this backward needs.
        self.pending_backward: Callable[[], object] = lambda: None

        # Conditions for a replay. GraphedCall sets and checks them.
        self.compared = False  # whether a replay was compared with an eager call
        self.addresses: list[int] = []  # addresses of the tensors that a replay reads in place
        self.callables: list[Any] = []  # submodules and functions at the time of the capture

        # What it cost.
        self.bytes = 0
        self.seconds = 0.0

        # Read before the forward runs, which may call requires_grad_() on an input.
        self.wants_gradient = [t.requires_grad for t in trial.inputs]

        # `trial.gradients` has one entry per captured backward, in the order of the captures.
        self._forward, *backwards = device.capture(self._works())
        self._backwards = dict(zip(trial.gradients, backwards, strict=True))

    def _works(self) -> Iterator[Work]:
        """Yield the forward, then the backwards. The device runs each of them before it takes the next.

        They reference the trial, not this Capture: a reference cycle would keep its memory alive.
        """
        yield self.trial.forward
        if not self.trial.grad:
            return

        # The inputs of the backwards. They are allocated between two captures, so that no replay overwrites them.
        self._grad_outputs = [torch.zeros_like(output) for output in self.trial.differentiable]
        self._single_backward = self.trial.has_compiled_backward
        for pattern in [self._all] if self._single_backward else self.patterns:
            pairs = zip(self._grad_outputs, pattern, strict=True)
            grad_outputs = [gradient if is_present else None for gradient, is_present in pairs]
            # The backward of all outputs runs last and may free the autograd graph.
            yield partial(self.trial.backward, grad_outputs, retain_graph=pattern != self._all)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Replay the call on its flattened arguments, and return the model's output."""
        if self.trial.grad:
            # Parameters are passed as arguments, so that autograd gives them their gradients.
            outputs = list(_Replay.apply(self, *tensors, *self.trial.parameters))
        else:
            outputs = self.forward(tensors)

        return unflatten(outputs, self.trial.output_spec)

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Replay the forward on `tensors`, shaped like the captured inputs, and return copies of the outputs."""
        with torch.no_grad():
            # _foreach_copy_ does not accept an empty list.
            if tensors:
                torch._foreach_copy_(self.trial.inputs, [t.detach() for t in tensors])

            self._forward()
            return _copies(self.trial.outputs)

    def backward(self, grad_outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay a backward. Takes a gradient, or None, for each differentiable output; returns one for each source."""
        pattern = tuple(gradient is not None for gradient in grad_outputs)
        if pattern not in self._backwards:
            # GraphedCall captures again with this pattern.
            self.unknown_pattern = None if self._single_backward else pattern
            pattern = self._all

        # The backward of all outputs also computes zeros for sources that no present gradient reaches. Leave them out.
        reached: set[int] = set()
        with torch.no_grad():
            for captured, gradient, sources in zip(self._grad_outputs, grad_outputs, self._reached, strict=True):
                if gradient is None:
                    captured.zero_()
                else:
                    captured.copy_(gradient)
                    reached |= sources

            self._backwards[pattern]()

            gradients = self.trial.gradients[pattern]
            used = {index: g for index, g in enumerate(gradients) if g is not None and index in reached}
            copies = dict(zip(used, _copies(list(used.values())), strict=True))

        return [copies.get(index) for index in range(len(gradients))]


class _Ticket:
    """Exists as long as a backward through one forward is still possible: autograd's context holds it."""


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, capture: Capture, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`tensors` are the inputs, then the parameters, which the replay reads in place."""
        ctx.capture = capture
        ctx.ticket = _Ticket()
        capture.pending_backward = weakref.ref(ctx.ticket)

        # Missing gradients stay None instead of zeros: see Capture.
        ctx.set_materialize_grads(False)
        outputs = capture.forward(tensors[: len(capture.trial.inputs)])

        ctx.differentiable = [output.requires_grad for output in capture.trial.outputs]
        pairs = zip(outputs, ctx.differentiable, strict=True)
        ctx.mark_non_differentiable(*(output for output, differentiable in pairs if not differentiable))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        # Not torch's `once_differentiable`: it lets a second derivative through, as zero, if no gradient that arrives
        # here requires one itself. That is so in every gradient penalty.
        if torch.is_grad_enabled():
            raise UserError(
                "a gradient was taken with create_graph=True through a model that runs as a CUDA graph",
                "a replayed backward cannot be differentiated again",
                "set graph=false",
            )

        if ctx.ticket is None:
            raise UserError(
                "backward() was called twice through one forward of a model that runs as a CUDA graph",
                "a replay keeps no activations after the first backward",
                "add up the losses and call backward() once, or set graph=false",
            )

        ctx.ticket = None

        # autograd passes an argument for every output, also for those that are not differentiable.
        pairs = zip(grad_outputs, ctx.differentiable, strict=True)
        gradients = iter(ctx.capture.backward([gradient for gradient, differentiable in pairs if differentiable]))

        # The sources are the inputs that require a gradient, then all parameters.
        input_gradients = [next(gradients) if wanted else None for wanted in ctx.capture.wants_gradient]
        return None, *input_gradients, *gradients


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies of all tensors, made with one kernel if torch has one."""
    copies = [torch.empty_like(tensor) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, [tensor.detach() for tensor in tensors])

    return copies
