"""Gradients that the user's code computes inside a loss: a gradient penalty, or `backward()` by mistake.

While a loss runs, every call of `torch.autograd.grad` and `backward` is intercepted here, and the driver may refuse it.
Both functions, and `Tensor.backward`, end in the private `torch.autograd._engine_run_backward`, which is replaced while
the loss runs. Replacing the public functions would miss a `from torch.autograd import grad`.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.task import Loss

_TORCH_ENGINE = torch.autograd._engine_run_backward  # pyrefly: ignore[missing-attribute]
_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep


@dataclass(frozen=True)
class InnerGradient:
    """One call of `torch.autograd.grad` or `backward` in the user's code."""

    call_site: str  # file, line and source text of the call
    outputs: Sequence[Tensor]
    inputs: Sequence[Any]  # empty: all leaves of the graph
    retains_graph: bool  # a later backward goes through the same graph, or through this gradient
    differentiable: bool  # create_graph=True: the loss depends on this gradient
    accumulates: bool  # the call is a `backward`, which adds to `.grad`


Callback = Callable[[InnerGradient], None]  # raises if the gradient cannot be computed


def watch_loss(loss_fn: Callable[[Any, Any], Loss], before: Callback) -> Callable[[Any, Any], Loss]:
    """Wrap a loss function so that `before` is called before each gradient that the loss computes itself."""

    def call(model: Any, data: Any) -> Loss:
        start_watching(before)
        try:
            return loss_fn(model, data)
        finally:
            stop_watching()

    return call


def start_watching(before: Callback) -> None:
    """From now on, call `before` before each gradient that is computed."""

    def run(outputs: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        # Activation checkpointing computes further gradients inside this call. They are part of it.
        with pause_watching():
            _, retains_graph, creates_graph, inputs = args[:4]
            accumulates = bool(kwargs.get("accumulate_grad"))
            before(InnerGradient(_call_site(), outputs, inputs, bool(retains_graph), bool(creates_graph), accumulates))
            return _TORCH_ENGINE(outputs, *args, **kwargs)

    torch.autograd._engine_run_backward = run  # pyrefly: ignore[missing-attribute]


def stop_watching() -> None:
    torch.autograd._engine_run_backward = _TORCH_ENGINE  # pyrefly: ignore[missing-attribute]


@contextmanager
def pause_watching() -> Iterator[None]:
    """Stop watching inside the `with` block, and afterwards restore the previous state."""
    engine = torch.autograd._engine_run_backward  # pyrefly: ignore[missing-attribute]
    stop_watching()
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = engine  # pyrefly: ignore[missing-attribute]


def refuse_backward(inner: InnerGradient, names: Mapping[int, str]) -> None:
    """Refuse a `backward()` that reaches a parameter of the model. `names` are the parameters' names by id.

    Any other `backward()` is allowed: an inner optimization of other tensors, for example.
    """
    if not inner.accumulates:
        return
    leaves = inner.inputs or _leaves(inner.outputs)
    reached = next((names[id(leaf)] for leaf in leaves if id(leaf) in names), None)
    if reached:
        raise UserError(
            f"the loss calls backward() itself, which adds to the gradient of {reached!r}",
            inner.call_site,
            "return the loss and leave backward() to Lockstep (in a loop of your own: step.backward(loss_sum, "
            "weight)); for a gradient inside the loss use torch.autograd.grad(...), or backward(inputs=[x])",
        )


def refuse_second_derivative(inner: InnerGradient) -> None:
    """Refuse a gradient that the loss depends on (create_graph=True), for tensor parallelism.

    The backward of torch's tensor-parallel collectives is not differentiable: the second derivatives would be silently
    wrong.
    """
    if inner.differentiable:
        raise UserError(
            "the loss depends on a gradient of the model (create_graph=True), which tensor parallelism (mesh.tp) "
            "cannot differentiate again",
            inner.call_site,
            "type strategy=ddp, strategy=zero1 or strategy=fsdp, without mesh.tp",
        )


def _leaves(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the leaf tensors of a graph, to whose `.grad` a backward adds."""
    yield from outputs  # an output may be a leaf itself
    pending = [output.grad_fn for output in outputs]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        pending.extend(following for following, _ in node.next_functions)


def _call_site() -> str:
    """Return file, line and source text of the innermost call outside torch and this module."""
    frame = sys._getframe(1)
    while frame.f_back and _is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    path, line = frame.f_code.co_filename, frame.f_lineno
    return f"{path}:{line}: {linecache.getline(path, line).strip()}".rstrip(": ")


def _is_internal(path: str) -> bool:
    return path == __file__ or path.startswith(_TORCH_FOLDER)
