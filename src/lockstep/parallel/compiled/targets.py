"""Compile a target in place, and take the compiled code away again."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_shapes
from torch import nn

from lockstep.parallel.blocks import find_blocks
from lockstep.parallel.call_chain import CallChain
from lockstep.parallel.compiled.decision import BLOCKS, LOSS

BACKEND: Any = "inductor"
MOST_VERSIONS = 8  # of one block, for classes of sizes

Function = Callable[..., Any]  # (model, *args), such as a task's loss


class Unsuitable(Exception):
    """Something that torch could compile, and that must not be compiled."""


class Target:
    """The compiled code of one target. It stays on the model until `remove`."""

    def __init__(self, name: str, model: nn.Module, function: Function | None, dynamic: bool, alone: bool):
        """`dynamic`: sizes vary. `alone`: there is one rank, so that collectives do not matter."""
        self.name = name
        self.model = model
        self.function: Function | None = None  # the compiled function, if the target is the loss
        self._modules: list[nn.Module] = []

        if name == LOSS:
            assert function is not None
            # Dimensions that vary are marked in the first call; all others are static.
            sizes = None if dynamic else False
            backend = checked_backend(function, alone)
            self.function = torch.compile(function, fullgraph=True, dynamic=sizes, backend=backend)
            return

        # A model that overrides `compile` compiles parts of itself, so every module may change.
        before = {module: compiled_call(module) for module in model.modules()}
        for module in find_blocks(model) if name == BLOCKS else [model]:
            own = type(module).compile is not nn.Module.compile
            CallChain.of(module).compile(**({} if own else {"dynamic": dynamic, "backend": BACKEND}))

        self._modules = [module for module, call in before.items() if compiled_call(module) is not call]

    def __call__(self, *args: Any) -> Any:
        """Call the compiled function with the model, without the links of the model's own call."""
        assert self.function is not None
        with CallChain.of(self.model).bypassed():
            return self.function(self.model, *args)

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Inside the `with` block, run the modules of this target eagerly, and no other compiled code."""
        with ExitStack() as stack:
            for module in self._modules:
                stack.enter_context(CallChain.of(module).bypassed())
            yield

    def remove(self) -> None:
        for module in self._modules:
            CallChain.of(module).uncompile()


def compiled_call(module: nn.Module) -> Any:
    """Return the compiled call of a module, or None."""
    return CallChain.of(module).compiled


def compiles_itself(model: nn.Module) -> bool:
    """Return whether the model says how to compile it: it overrides `compile`."""
    return type(model).compile is not nn.Module.compile


@contextmanager
def compiling(blocks: int) -> Iterator[None]:
    """Set what torch.compile needs while it compiles a model with so many blocks."""
    import torch._dynamo.config as dynamo  # slow to import, and needed only here

    before = symbolic_shapes.use_duck_shape, dynamo.recompile_limit

    # Two dynamic dimensions that happen to be equal in the first batch may differ in the next.
    symbolic_shapes.use_duck_shape = False

    # Blocks that differ in a number, such as their index, are traced one by one. torch stops at 8, and would run the
    # rest eagerly.
    dynamo.recompile_limit = max(dynamo.recompile_limit, blocks + MOST_VERSIONS)
    try:
        yield
    finally:
        symbolic_shapes.use_duck_shape, dynamo.recompile_limit = before


def checked_backend(function: Function, alone: bool) -> Any:
    """Return a compiler for the graph of a loss that refuses what must not be compiled, before it takes long."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        # A loss that changes something in Python (counts, appends to a list) must be called once for each micro-batch,
        # and so cannot be compared with eager. Nothing has run yet.
        if changed := changed_objects():
            raise Unsuitable(f"it has side effects in Python: it changes {', '.join(changed)}")

        # The model's buffers are restored after a trial, and batches are copied; other tensors are neither.
        if changed := changed_inputs(graph, tuple(inspect.signature(function).parameters)):
            raise Unsuitable(f"it changes tensors in place: {', '.join(changed)}")

        # The ranks do not compile at the same time, and would wait for each other in a collective.
        for node in graph.graph.nodes if not alone else ():
            home = str(getattr(node.target, "__module__", ""))
            if "c10d" in str(node.target) or home.startswith("torch.distributed"):
                raise Unsuitable(f"it contains a collective ({node.target})")

        backend = torch._dynamo.lookup_backend(BACKEND) if isinstance(BACKEND, str) else BACKEND
        return backend(graph, inputs)

    return compile_graph


def changed_objects() -> list[str]:
    """Return the names of existing Python objects that are changed by the function that torch traces now.

    It reads private attributes of torch. Where they are missing, a loss is not compiled.
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator
        from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

        effects = InstructionTranslator.current_tx().output.side_effects
        changed = [variable for variable in effects.id_to_variable.values() if effects.is_modified(variable)]
    except (ImportError, AttributeError) as error:
        raise Unsuitable("this version of torch does not tell whether it has side effects") from error

    existing = [v for v in changed if isinstance(v.mutation_type, AttributeMutationExisting | ValueMutationExisting)]
    # By identity: the variables of lists cannot be compared.
    stored = {id(variable): values for variable, values in effects.store_attr_mutations.items()}
    return sorted({_name(v.source) for v in existing if not _is_restored(v, stored.get(id(v)))})


# What returns a view of its first argument, so that a change of the view changes the argument.
VIEWS = {
    *("getitem", "getattr", "view", "reshape", "detach", "transpose", "t", "permute", "squeeze", "unsqueeze", "narrow"),
    *("select", "chunk", "split", "unbind", "expand", "flatten", "unflatten", "view_as", "expand_as", "movedim"),
    *("swapaxes", "diagonal", "alias", "real", "data", "T", "mT"),
}
# What changes its first argument, besides functions whose names end in an underscore, and names that only look so.
IN_PLACE = {
    "setitem",
    "iadd",
    "isub",
    "imul",
    "itruediv",
    "ifloordiv",
    "imod",
    "ipow",
    "imatmul",
    "iand",
    "ior",
    "ixor",
}
NOT_IN_PLACE = {"and_", "or_", "not_", "is_"}


def changed_inputs(graph: torch.fx.GraphModule, arguments: tuple[str, ...]) -> list[str]:
    """Return the tensors that a graph changes in place, besides those that it gets in `arguments`."""
    changed = set()
    for node in graph.graph.nodes:
        if node.op not in ("call_function", "call_method") or not _is_in_place(node):
            continue

        for argument in (node.kwargs.get("out"), node.args[0] if node.args else None):
            while isinstance(argument, torch.fx.Node) and argument.op != "placeholder":
                argument = argument.args[0] if _operation(argument) in VIEWS and argument.args else None

            if isinstance(argument, torch.fx.Node):
                name = _source(argument)
                if name.split(".")[0].split("[")[0] not in arguments:
                    changed.add(name)

    return sorted(changed)


def _is_in_place(node: torch.fx.Node) -> bool:
    name = _operation(node)
    underscore = name.endswith("_") and not name.endswith("__") and name not in NOT_IN_PLACE
    return underscore or name in IN_PLACE or "out" in node.kwargs or bool(node.kwargs.get("inplace"))


def _operation(node: torch.fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _source(node: torch.fx.Node) -> str:
    """Return where a graph's input comes from: `self.center`, `batch[0]`."""
    argument = node.meta.get("grapharg")
    source = getattr(argument, "source", None) or getattr(node, "_dynamo_source", None)
    return _name(source) if source else f"an unknown tensor ({node.name})"


def _is_restored(variable: Any, stored: Any) -> bool:
    """Return whether all that is set on an object has the value from before, as after `with` in transformers."""
    if not stored:
        return False

    owner = getattr(variable, "value", None)
    return owner is not None and all(
        new.is_python_constant()
        and type(new.as_python_constant()) is type(getattr(owner, name, _name))
        and new.as_python_constant() == getattr(owner, name)
        for name, new in stored.items()
    )


def _name(source: Any) -> str:
    """Return `self.count` for what torch calls `L['self'].count`."""
    name = source.name if isinstance(getattr(source, "name", None), str) else source.name() if source else "a closure"
    return re.sub(r"[LG]\['(\w+)'\]", r"\1", name)
