"""Compile a target in place, and take the compiled code away again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_shapes
from torch import nn

from lockstep.parallel.blocks import find_blocks
from lockstep.parallel.call_chain import CallChain
from lockstep.parallel.compiled.decision import BLOCKS, LOSS

BACKEND: Any = "inductor"
SIDE_EFFECTS = "side effects happened"  # a part of torch's own message
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
            self.function = torch.compile(function, fullgraph=True, dynamic=sizes, backend=checked_backend(alone))
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

    def remove(self) -> None:
        for module in self._modules:
            CallChain.of(module).uncompile()


def compiled_call(module: nn.Module) -> Any:
    """Return the compiled call of a module, or None."""
    return CallChain.of(module).compiled


def compiles_itself(model: nn.Module) -> bool:
    """Return whether the user has compiled a part of the model, or says how to: it overrides `compile`."""
    return type(model).compile is not nn.Module.compile or any(map(compiled_call, model.modules()))


@contextmanager
def compiling(name: str, blocks: int) -> Iterator[None]:
    """Set what torch.compile needs while it compiles a target of a model with so many blocks."""
    import torch._dynamo.config as dynamo  # slow to import, and needed only here

    before = symbolic_shapes.use_duck_shape, dynamo.recompile_limit

    # Two dynamic dimensions that happen to be equal in the first batch may differ in the next.
    symbolic_shapes.use_duck_shape = False

    # Blocks that differ in a number, such as their index, are traced one by one. torch stops at 8, and would run the
    # rest eagerly.
    dynamo.recompile_limit = max(dynamo.recompile_limit, blocks + MOST_VERSIONS)
    try:
        with _no_side_effects(dynamo) if name == LOSS else nullcontext():
            yield
    finally:
        symbolic_shapes.use_duck_shape, dynamo.recompile_limit = before


@contextmanager
def _no_side_effects(dynamo: Any) -> Iterator[None]:
    """Refuse to compile a function that changes something in Python: appends to a list, counts, keeps a tensor.

    Such a function must be called once for each micro-batch, so it cannot be compared with eager. torch finds it out
    while it traces, before it runs anything.
    """
    before = getattr(dynamo, "side_effect_replay_policy", None)
    if before is None:
        raise Unsuitable("this version of torch cannot tell whether it has side effects")

    dynamo.side_effect_replay_policy = "error"
    try:
        yield
    finally:
        dynamo.side_effect_replay_policy = before


def checked_backend(alone: bool) -> Any:
    """Return a compiler for the graph of a loss that refuses what must not be compiled, before it takes long."""

    def compile_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        if changed := _changed_objects():
            raise Unsuitable(f"{SIDE_EFFECTS}: {changed}")

        # The ranks do not compile at the same time, and would wait for each other in a collective.
        for node in graph.graph.nodes if not alone else ():
            home = str(getattr(node.target, "__module__", ""))
            if "c10d" in str(node.target) or home.startswith("torch.distributed"):
                raise Unsuitable(f"it contains a collective ({node.target})")

        backend = torch._dynamo.lookup_backend(BACKEND) if isinstance(BACKEND, str) else BACKEND
        return backend(graph, inputs)

    return compile_graph


def _changed_objects() -> list[str]:
    """Return the names of existing Python objects that the function changes which torch traces now.

    This reads private attributes of torch, to refuse early. `_no_side_effects` refuses without them, after compiling.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return list(InstructionTranslator.current_tx().output.get_replayed_side_effect_source_refs())
    except AttributeError:
        return []
