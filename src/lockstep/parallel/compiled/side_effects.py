"""Refuse to compile a loss that must not be compiled, when torch has traced it and before anything runs.

A loss with side effects must be called once for each micro-batch, so that it can neither be compiled nor compared with
eager. Some of this reads private attributes of torch; where they are missing, a loss is not compiled.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.parallel.meta.recording import written_tensors

Function = Callable[..., Any]  # (model, *args), such as a task's loss
Backend = Callable[[torch.fx.GraphModule, Any], Any]  # what compiles a graph


class Unsuitable(Exception):
    """Something that torch could compile, and that must not be compiled."""


def checked_backend(function: Function, alone: bool, backend: Backend) -> Backend:
    """Return a backend that compiles the graph of `function`, but first refuses what must not be compiled.

    alone: there is one rank, so that collectives do not matter
    backend: what compiles the graph in the end
    """

    def compile_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        # A loss that changes something in Python (counts, appends to a list) must be called once for each micro-batch,
        # and so cannot be compared with eager. Nothing has run yet.
        if changed := changed_objects():
            raise Unsuitable(f"it has side effects in Python: it changes {', '.join(changed)}")

        # The ranks do not compile at the same time, and would wait for each other in a collective.
        if not alone:
            refuse_collectives(graph)

        # The model's buffers are restored after a trial, and batches are copied; other tensors are neither.
        if changed := changed_inputs(graph, tuple(inspect.signature(function).parameters)):
            raise Unsuitable(f"it changes tensors in place: {', '.join(changed)}")

        return backend(graph, inputs)

    return compile_graph


def refuse_collectives(graph: torch.fx.GraphModule) -> None:
    """Raise Unsuitable if a graph contains a collective."""
    for node in graph.graph.nodes:
        # Functional collectives are operators of c10d. The others are functions of torch.distributed.
        module = str(getattr(node.target, "__module__", ""))
        if "c10d" in str(node.target) or module.startswith("torch.distributed"):
            raise Unsuitable(f"it contains a collective ({node.target})")


def changed_objects() -> list[str]:
    """Return the names of existing Python objects that are changed by the function that torch traces now."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator
        from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

        effects = InstructionTranslator.current_tx().output.side_effects
        changed = [variable for variable in effects.id_to_variable.values() if effects.is_modified(variable)]
    except (ImportError, AttributeError) as error:
        raise Unsuitable("this version of torch does not tell whether it has side effects") from error

    # The function may change what it has made itself, such as a list of results.
    existing = [v for v in changed if isinstance(v.mutation_type, AttributeMutationExisting | ValueMutationExisting)]

    # By identity: the variables of lists cannot be compared.
    stored = {id(variable): values for variable, values in effects.store_attr_mutations.items()}
    lasting = [variable for variable in existing if not _is_restored(variable, stored.get(id(variable)))]
    return sorted({_name(variable.source) for variable in lasting})


class _Writes(TorchDispatchMode):
    """Notes the memory that operations write into, as their schemas say."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # An operator that takes functions has no schema. torch counts what these change, see below.
        if isinstance(func, torch._ops.OpOverload):
            written = written_tensors(func, args, kwargs or {})

            # The schemas of batch norms do not say that they update running_mean and running_var, if training is true.
            if "batch_norm" in func.__name__ and len(args) > 5 and args[5] is True:
                written += [tensor for tensor in args[3:5] if tensor is not None]

            self.storages |= {tensor.untyped_storage()._cdata for tensor in written}

        return func(*args, **(kwargs or {}))


def changed_inputs(graph: torch.fx.GraphModule, arguments: tuple[str, ...]) -> list[str]:
    """Return the tensors that a graph changes in place, besides those that it gets in `arguments`."""
    # torch has traced the graph on tensors without values. It runs on them once more, so that every write is seen:
    # through views, by operations on lists, by norms that update running statistics.
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("example_value") for node in inputs]
    changed = {_source(node) for node, value in zip(inputs, values, strict=True) if getattr(value, "_version", 0)}

    mode = next((value.fake_mode for value in values if hasattr(value, "fake_mode")), nullcontext())
    with mode, _Writes() as writes:
        graph(*values)

    for node, value in zip(inputs, values, strict=True):
        if isinstance(value, Tensor) and value.untyped_storage()._cdata in writes.storages:
            changed.add(_source(node))

    return sorted(name for name in changed if name.split(".")[0].split("[")[0] not in arguments)


def _source(node: torch.fx.Node) -> str:
    """Return where a graph's input comes from: `self.center`, `batch[0]`."""
    argument = node.meta.get("grapharg")
    source = getattr(argument, "source", None) or getattr(node, "_dynamo_source", None)
    return _name(source) if source else f"an unknown tensor ({node.name})"


def _is_restored(variable: Any, stored: Any) -> bool:
    """Return whether all attributes that are set on an object end with their old values.

    Context managers in transformers, for example, set a flag and reset it.

    stored: the variables that torch will store on the object, by attribute
    """
    if not stored:
        return False

    owner = getattr(variable, "value", None)
    if owner is None:
        return False

    for name, new in stored.items():
        if not new.is_python_constant():
            return False

        # The types must be equal as well, since 1 == True. A missing attribute is equal to nothing.
        before = getattr(owner, name, object())
        after = new.as_python_constant()
        if type(after) is not type(before) or after != before:
            return False

    return True


def _name(source: Any) -> str:
    """Return `self.count` for what torch calls `L['self'].count`."""
    # A method in some versions of torch, an attribute in others.
    name = getattr(source, "name", None)
    if not isinstance(name, str):
        name = source.name() if source else "a closure"

    return re.sub(r"[LG]\['(\w+)'\]", r"\1", name)
