"""Refuse to compile a loss that must not be compiled, when torch has traced it and before anything runs.

A loss with side effects must be called once for each micro-batch, so that it can neither be compiled nor compared with
eager. Some of this reads private attributes of torch; where they are missing, a loss is not compiled.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

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

        # The model's buffers are restored after a trial, and batches are copied; other tensors are neither.
        if changed := changed_inputs(graph, tuple(inspect.signature(function).parameters)):
            raise Unsuitable(f"it changes tensors in place: {', '.join(changed)}")

        # The ranks do not compile at the same time, and would wait for each other in a collective.
        if not alone:
            refuse_collectives(graph)

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


# What returns a view of its first argument, so that a change of the view changes the argument.
VIEWS = {
    *("getitem", "getattr", "view", "reshape", "detach", "transpose", "t", "permute", "squeeze", "unsqueeze", "narrow"),
    *("select", "chunk", "split", "unbind", "expand", "flatten", "unflatten", "view_as", "expand_as", "movedim"),
    *("swapaxes", "diagonal", "alias", "real", "data", "_get_data_attr", "T", "mT"),
}

# What changes its first argument, besides functions whose names end in an underscore.
IN_PLACE = {
    *("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor"),
}

# What changes nothing, although its name ends in an underscore: functions of the module `operator`.
NOT_IN_PLACE = {"and_", "or_", "not_", "is_"}

# Norms change their running statistics, the second and third argument, if the sixth one is true. By function: the name
# of that argument, and its default.
NORMS = {F.batch_norm: ("training", False), F.instance_norm: ("use_input_stats", True)}


def changed_inputs(graph: torch.fx.GraphModule, arguments: tuple[str, ...]) -> list[str]:
    """Return the tensors that a graph changes in place, besides those that it gets in `arguments`."""
    changed = set()
    for node in graph.graph.nodes:
        # torch has run the graph on tensors without values, and counts the changes of each, also through views.
        if node.op == "placeholder" and getattr(node.meta.get("example_value"), "_version", 0):
            changed.add(_source(node))

        # It does not count the changes that some operations make.
        for argument in _changed_arguments(node):
            # Follow views back to the input of the graph that they look into, if they come from one.
            while isinstance(argument, torch.fx.Node) and argument.op != "placeholder":
                argument = argument.args[0] if _operation(argument) in VIEWS and argument.args else None

            if isinstance(argument, torch.fx.Node):
                changed.add(_source(argument))

    return sorted(name for name in changed if name.split(".")[0].split("[")[0] not in arguments)


def _changed_arguments(node: torch.fx.Node) -> list[Any]:
    """Return the arguments that an operation changes."""
    if node.op not in ("call_function", "call_method"):
        return []

    # A norm updates its running statistics.
    if node.target in NORMS:
        name, default = NORMS[node.target]
        updates = node.args[5] if len(node.args) > 5 else node.kwargs.get(name, default)
        if not updates:
            return []
        return [*node.args[1:3], node.kwargs.get("running_mean"), node.kwargs.get("running_var")]

    if not _is_in_place(node):
        return []

    # Operations on lists (`torch._foreach_mul_`) change every element.
    first = node.args[0] if node.args else None
    elements = first if isinstance(first, list | tuple) else [first]
    return [node.kwargs.get("out"), *elements]


def _is_in_place(node: torch.fx.Node) -> bool:
    """Return whether a node changes one of its arguments, judged by the convention of torch's names."""
    name = _operation(node)
    underscore = name.endswith("_") and not name.endswith("__") and name not in NOT_IN_PLACE

    # `out=` and `inplace=True` are torch's other two ways to say so.
    by_argument = "out" in node.kwargs or bool(node.kwargs.get("inplace"))
    return underscore or name in IN_PLACE or by_argument


def _operation(node: torch.fx.Node) -> str:
    """Return the name of a method, such as `add_`, or of a function."""
    if isinstance(node.target, str):
        return node.target
    return getattr(node.target, "__name__", str(node.target))


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
