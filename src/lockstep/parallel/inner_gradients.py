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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lockstep.errors import UserError
from lockstep.task import Loss

_ENGINE = torch.autograd._engine_run_backward  # pyrefly: ignore[missing-attribute]
_TORCH = os.path.dirname(torch.__file__) + os.sep

# The nodes between shards and full tensors in the graph of a layer that is sharded, by the names that torch gives them.
SHARDED_LAYER_NODES = frozenset({"_FromTorchTensorBackward", "_ToTorchTensorBackward", "RedistributeBackward"})

Output = Tensor | GradientEdge  # what a gradient starts from, or is wanted of


@dataclass(frozen=True)
class InnerGradient:
    """One call of `torch.autograd.grad` or `backward` in the user's code, or in torch's for it.

    torch.compile computes gradients of stand-ins while it traces, and torch.func of its own wrappers: `reaches` tells
    them from those of the model.
    """

    place: str  # its file, line and text
    outputs: Sequence[Output]
    inputs: Sequence[Output]  # empty: all leaves of the graph
    retains_graph: bool  # the loss will be backpropagated through the same graph, or through this gradient
    differentiable: bool  # with create_graph=True: the loss depends on this gradient
    accumulates: bool  # `backward`: it adds to `.grad`

    def reaches(self, leaves: Collection[int], nodes: Collection[str] = (), tensors: Sequence[Tensor] = ()) -> bool:
        """Return whether the graph of the outputs has one of these in it.

        leaves: ids of tensors at its ends; nodes: names of nodes; tensors: what was computed on the way, or at its ends
        """
        ends = {*leaves, *map(id, tensors)}
        made_by = {tensor.grad_fn for tensor in tensors} - {None}
        return any(id(leaf) in ends for leaf in _leaves(self.outputs)) or any(
            node in made_by or node.name() in nodes for node in _nodes(self.outputs)
        )


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

    def run(outputs: Sequence[Output], *args: Any, **kwargs: Any) -> Any:
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
    leaves = map(_tensor_at, inner.inputs) if inner.inputs else _leaves(inner.outputs)
    reached = next((names[id(leaf)] for leaf in leaves if id(leaf) in names), None)
    if reached:
        raise UserError(
            f"the loss calls backward() itself, and adds to the gradient of {reached!r} besides the step",
            inner.place,
            "return the loss and leave backward() to Lockstep (in a loop of your own: step.backward(loss_sum, "
            "weight)); for a gradient inside the loss use torch.autograd.grad(...), or backward(inputs=[x])",
        )


def asked_for(inner: InnerGradient, names: Mapping[int, str]) -> str | None:
    """Return the first of the named tensors, which `names` has by id, that the gradient is wanted of."""
    return next((names[id(leaf)] for leaf in map(_tensor_at, inner.inputs) if id(leaf) in names), None)


def refuse_second_derivative(inner: InnerGradient, leaves: Collection[int]) -> None:
    """Refuse a gradient of the model that the loss depends on, where layers are sharded. `leaves`: its parameters' ids.

    torch's collectives between the shards of a layer have a backward, but it is not one that can be differentiated:
    the gradients would be wrong, without an error.
    """
    if inner.differentiable and inner.reaches(leaves, SHARDED_LAYER_NODES):
        raise UserError(
            "the loss depends on a gradient of the model (create_graph=True), which tensor parallelism (mesh.tp) "
            "cannot differentiate again",
            inner.place,
            "type strategy=ddp, strategy=zero1 or strategy=fsdp, without mesh.tp",
        )


def _leaves(outputs: Sequence[Output]) -> Iterator[Any]:
    """Yield the tensors at the ends of a graph, into whose `.grad` a backward adds."""
    yield from map(_tensor_at, outputs)
    for node in _nodes(outputs):
        if hasattr(node, "variable"):
            yield node.variable


def _nodes(outputs: Sequence[Output]) -> Iterator[Any]:
    """Yield every node of a graph once."""
    waiting: list[Any] = [output.node if isinstance(output, GradientEdge) else output.grad_fn for output in outputs]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(following for following, _ in node.next_functions)


def _tensor_at(end: Output) -> Any:
    """Return the tensor itself, or the leaf that an edge leads to; None if it leads to something that was computed."""
    return getattr(end.node, "variable", None) if isinstance(end, GradientEdge) else end


def _place() -> str:
    """Return the file, the line and the text of the nearest call outside of torch and of this module."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(_TORCH)):
        frame = frame.f_back
    path, line = frame.f_code.co_filename, frame.f_lineno
    return f"{path}:{line}: {linecache.getline(path, line).strip()}".rstrip(": ")
