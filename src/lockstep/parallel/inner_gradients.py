"""Gradients that the user's code computes inside a loss: a gradient penalty, or `backward()` by mistake.

While a loss runs, every call of `torch.autograd.grad` and `backward` is intercepted here, and the driver may refuse it.
Both functions, and `Tensor.backward`, end in the private `torch.autograd._engine_run_backward`, which is replaced while
the loss runs. torch has no public way to see such a gradient before it is computed, and replacing the public functions
would miss a `from torch.autograd import grad`. tests/ranks/test_inner_gradients.py shows what would go wrong.

A driver's own backward calls that private function as it is in torch (`TORCH_ENGINE`). It is replaced for each loss and
not for a whole step, because the step's own backwards, and the gradients that activation checkpointing computes in
them, are not the user's.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lockstep.errors import UserError
from lockstep.runtime.autograd_graph import autograd_nodes

_autograd: Any = torch.autograd
TORCH_ENGINE = _autograd._engine_run_backward
_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep

# The nodes between shards and full tensors in the graph of a layer that is sharded, by the names that torch gives them.
SHARDED_LAYER_NODES = frozenset({"_FromTorchTensorBackward", "_ToTorchTensorBackward", "RedistributeBackward"})

Output = Tensor | GradientEdge  # an output or input of a graph: a gradient starts here, or is taken with respect to it


@dataclass(frozen=True)
class InnerGradient:
    """One call of `torch.autograd.grad` or `backward`, by the user's code or by torch on its behalf.

    While it traces, torch.compile computes gradients of fake tensors, and torch.func of its own wrappers: `reaches`
    tells them from those of the model.
    """

    call_site: str  # file, line and source text of the call
    outputs: Sequence[Output]
    inputs: Sequence[Output]  # empty: all leaves of the graph
    retains_graph: bool  # a later backward goes through the same graph, or through this gradient
    differentiable: bool  # create_graph=True: the loss depends on this gradient
    accumulates: bool  # the call is a `backward`, which adds to `.grad`

    def reaches(self, leaves: Collection[int], nodes: Collection[str] = (), tensors: Sequence[Tensor] = ()) -> bool:
        """Return whether the graph of the outputs contains one of these.

        leaves: ids of tensors at which the graph ends
        nodes: names of its nodes
        tensors: tensors at which it ends, or that were computed on the way
        """
        ends = {*leaves, *map(id, tensors)}
        made_by = {tensor.grad_fn for tensor in tensors} - {None}
        return any(id(leaf) in ends for leaf in _leaves(self.outputs)) or any(
            node in made_by or node.name() in nodes for node in _nodes(self.outputs)
        )


Callback = Callable[[InnerGradient], None]  # called before the gradient is computed, and raises if it cannot be


class InnerGradients:
    """Calls `before` before each gradient that the user's code computes inside a `with` block.

    A class, because a generator takes several times as long, and every micro-batch enters a block.
    """

    def __init__(self, before: Callback | None):
        """`before` may raise. If it is None, all gradients are let through, even inside a block of another object."""
        self.keeps_graphs = False  # whether one of these gradients went through a graph that is needed again
        self._before = before
        self._engine = TORCH_ENGINE if before is None else _intercepting_engine(self._note)

        # The engines that open blocks have replaced, the outermost first. That is torch's own, unless the run is inside
        # the loss, or the loop, of another run.
        self._replaced: list[Callable[..., Any]] = []

    def _note(self, inner: InnerGradient) -> None:
        assert self._before is not None
        self.keeps_graphs |= inner.retains_graph or inner.differentiable
        self._before(inner)

    def __enter__(self) -> None:
        self._replaced.append(_autograd._engine_run_backward)
        _autograd._engine_run_backward = self._engine

    def __exit__(self, *_: object) -> None:
        if self._replaced:
            _autograd._engine_run_backward = self._replaced.pop()

    def leave(self) -> None:
        """Leave all open blocks. A custom loop that fails may be inside one, which Python closes much later."""
        if self._replaced:
            _autograd._engine_run_backward = self._replaced[0]
            self._replaced.clear()


LET_THROUGH = InnerGradients(None)


def _intercepting_engine(before: Callback) -> Callable[..., Any]:
    """Return a replacement for torch's engine that calls `before` first."""

    def run(outputs: Sequence[Output], *args: Any, **kwargs: Any) -> Any:
        # Activation checkpointing computes further gradients inside this call. They are part of it.
        with LET_THROUGH:
            _, retains_graph, creates_graph, inputs = args[:4]
            accumulates = bool(kwargs.get("accumulate_grad"))
            before(InnerGradient(_call_site(), outputs, inputs, bool(retains_graph), bool(creates_graph), accumulates))
            return TORCH_ENGINE(outputs, *args, **kwargs)

    return run


def refuse_backward(inner: InnerGradient, names: Mapping[int, str]) -> None:
    """Refuse a `backward()` that reaches a parameter of the model. `names` are the parameters' names by id.

    Any other `backward()` is allowed: an inner optimization of other tensors, for example.
    """
    if not inner.accumulates:
        return

    leaves = map(_tensor_at, inner.inputs) if inner.inputs else _leaves(inner.outputs)
    reached = next((names[id(leaf)] for leaf in leaves if id(leaf) in names), None)
    if reached:
        raise UserError(
            f"the loss calls backward() itself, which adds to the gradient of {reached!r}",
            inner.call_site,
            "return the loss and leave backward() to Lockstep (in a custom loop: step.backward(loss_sum, "
            "weight)); for a gradient inside the loss use torch.autograd.grad(...), or backward(inputs=[x])",
            cause="left-gradient",
        )


def asked_for(inner: InnerGradient, names: Mapping[int, str]) -> str | None:
    """Return the name of the first input of `inner` that is in `names`, which maps tensors' ids to names."""
    return next((names[id(leaf)] for leaf in map(_tensor_at, inner.inputs) if id(leaf) in names), None)


def refuse_second_derivative(inner: InnerGradient, leaves: Collection[int]) -> None:
    """Refuse a gradient of the model that the loss depends on (create_graph=True), for tensor parallelism.

    `leaves` has the ids of the model's parameters.

    The backward of torch's tensor-parallel collectives is not differentiable: the second derivatives would be silently
    wrong.
    """
    if inner.differentiable and inner.reaches(leaves, SHARDED_LAYER_NODES):
        raise UserError(
            "the loss depends on a gradient of the model (create_graph=True), which tensor parallelism (mesh.tp) "
            "cannot differentiate again",
            inner.call_site,
            "set strategy=ddp, strategy=zero1 or strategy=fsdp, without mesh.tp",
        )


def refuse_second_backward(inner: InnerGradient, leaves: Collection[int]) -> None:
    """Refuse a gradient of the model whose graph a later backward goes through again, for `remat=selective`.

    `leaves` has the ids of the model's parameters.
    """
    if (inner.retains_graph or inner.differentiable) and inner.reaches(leaves):
        raise UserError(
            "the loss computes a gradient of the model and goes on with its graph, which remat=selective does not "
            "support: torch lets one backward through what it has kept",
            inner.call_site,
            "set remat=full, or remat=every-2, or remat=none",
        )


def _leaves(outputs: Sequence[Output]) -> Iterator[Any]:
    """Yield the leaf tensors of a graph, to whose `.grad` a backward adds."""
    yield from map(_tensor_at, outputs)  # an output may be a leaf itself
    for node in _nodes(outputs):
        if hasattr(node, "variable"):
            yield node.variable


def _nodes(outputs: Sequence[Output]) -> Iterator[Any]:
    """Return every node of a graph once."""
    return autograd_nodes(output.node if isinstance(output, GradientEdge) else output.grad_fn for output in outputs)


def _tensor_at(end: Output) -> Any:
    """Return the tensor itself, or the leaf that an edge leads to; None if the edge leads to a computed tensor."""
    return getattr(end.node, "variable", None) if isinstance(end, GradientEdge) else end


def _call_site() -> str:
    """Return file, line and source text of the innermost call outside torch and this module."""
    frame = sys._getframe(1)
    while frame.f_back and _is_internal(frame.f_code.co_filename):
        frame = frame.f_back

    path, line = frame.f_code.co_filename, frame.f_lineno
    return f"{path}:{line}: {linecache.getline(path, line).strip()}".rstrip(": ")


def _is_internal(path: str) -> bool:
    return path == __file__ or path.startswith(_TORCH_FOLDER)
