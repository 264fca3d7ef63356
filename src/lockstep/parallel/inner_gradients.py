"""Gradients that the user's code computes inside a loss: a gradient penalty, or `backward()` by mistake.

While a loss runs, every call of `torch.autograd.grad` and `backward` is seen here first, with its place in the user's
code, and the driver says whether it can go on. Both functions of torch, and `Tensor.backward`, end in the private
`torch.autograd._engine_run_backward`. It is replaced for the time of the loss: the public names would miss a
`from torch.autograd import grad`.
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

_ENGINE = torch.autograd._engine_run_backward  # pyrefly: ignore[missing-attribute]
_TORCH = os.path.dirname(torch.__file__) + os.sep


@dataclass(frozen=True)
class InnerGradient:
    """One call of `torch.autograd.grad` or `backward` in the user's code."""

    place: str  # its file, line and text
    outputs: Sequence[Tensor]
    inputs: Sequence[Any]  # empty: all leaves of the graph
    retains_graph: bool  # the loss will be backpropagated through the same graph, or through this gradient
    differentiable: bool  # with create_graph=True: the loss depends on this gradient
    accumulates: bool  # `backward`: it adds to `.grad`


Before = Callable[[InnerGradient], None]  # raises if the gradient cannot be computed


def watched(loss_fn: Callable[[Any, Any], Loss], before: Before) -> Callable[[Any, Any], Loss]:
    """Return the loss function; `before` is called before each gradient that it computes itself."""

    def call(model: Any, data: Any) -> Loss:
        start_watching(before)
        try:
            return loss_fn(model, data)
        finally:
            stop_watching()

    return call


def start_watching(before: Before) -> None:
    """Call `before` from now on before each gradient that is computed."""

    def run(outputs: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        # A gradient that is computed while this one is, such as that of recomputed blocks, belongs to it.
        with unwatched():
            _, retains_graph, creates_graph, inputs = args[:4]
            accumulates = bool(kwargs.get("accumulate_grad"))
            before(InnerGradient(_place(), outputs, inputs, bool(retains_graph), bool(creates_graph), accumulates))
            return _ENGINE(outputs, *args, **kwargs)

    torch.autograd._engine_run_backward = run  # pyrefly: ignore[missing-attribute]


def stop_watching() -> None:
    torch.autograd._engine_run_backward = _ENGINE  # pyrefly: ignore[missing-attribute]


@contextmanager
def unwatched() -> Iterator[None]:
    """Let gradients be computed as always; afterwards watch again, if that was so before."""
    engine = torch.autograd._engine_run_backward  # pyrefly: ignore[missing-attribute]
    stop_watching()
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = engine  # pyrefly: ignore[missing-attribute]


def refuse_backward(inner: InnerGradient, names: Mapping[int, str]) -> None:
    """Refuse a `backward()` that reaches the model. `names` has those of its parameters, by id.

    One that does not is the user's own business: an inner optimization of something else.
    """
    if not inner.accumulates:
        return
    leaves = inner.inputs or _leaves(inner.outputs)
    reached = next((names[id(leaf)] for leaf in leaves if id(leaf) in names), None)
    if reached:
        raise UserError(
            f"the loss calls backward() itself, and adds to the gradient of {reached!r} besides the step",
            inner.place,
            "return the loss and leave backward() to Lockstep (in a custom loop: step.backward(loss_sum, "
            "weight)); for a gradient inside the loss use torch.autograd.grad(...), or backward(inputs=[x])",
        )


def refuse_second_derivative(inner: InnerGradient) -> None:
    """Refuse a gradient that the loss depends on, where layers are sharded.

    torch's collectives between the shards of a layer have a backward, but it is not one that can be differentiated:
    the gradients would be wrong, without an error.
    """
    if inner.differentiable:
        raise UserError(
            "the loss depends on a gradient of the model (create_graph=True), which tensor parallelism (mesh.tp) "
            "cannot differentiate again",
            inner.place,
            "type strategy=ddp, strategy=zero1 or strategy=fsdp, without mesh.tp",
        )


def _leaves(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors at the ends of a graph, into whose `.grad` a backward adds."""
    yield from outputs
    waiting = [output.grad_fn for output in outputs]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting.extend(following for following, _ in node.next_functions)


def _place() -> str:
    """Return the file, the line and the text of the nearest call outside of torch and of this module."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(_TORCH)):
        frame = frame.f_back
    path, line = frame.f_code.co_filename, frame.f_lineno
    return f"{path}:{line}: {linecache.getline(path, line).strip()}".rstrip(": ")
