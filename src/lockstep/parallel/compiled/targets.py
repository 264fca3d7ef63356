"""The targets: what can be compiled, how compiled code is put on the model, and how it is taken off again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_shapes
from torch import nn

from lockstep.parallel.calls.chain import CallChain
from lockstep.parallel.compiled.side_effects import Function, checked_backend

# What may be compiled: the loss together with the model, the model alone, or each of its repeated blocks.
LOSS = "the loss with the model"
MODEL = "the model"
BLOCKS = "the blocks"

BACKEND: Any = "inductor"
MOST_VERSIONS = 8  # the most versions of one block, one for each class of sizes


class Target:
    """The compiled code of one target. It stays on the model until `remove`."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        function: Function | None,
        dynamic: bool,
        alone: bool,
        check_time: Callable[[], None],
    ):
        """Put the code on the model. torch compiles it in the first call.

        dynamic: sizes vary
        alone: there is one rank, so that collectives do not matter
        check_time: called with every graph that torch has traced; it raises if too much time has passed
        """
        self.name = name
        self.model = model
        self.function: Function | None = None  # the compiled function, if the target is the loss
        self._modules: list[nn.Module] = []

        # One function for all blocks: torch lets them share code only if their backends are equal.
        compile_any = torch._dynamo.lookup_backend(BACKEND)  # BACKEND is a name, or already a function

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            check_time()
            return compile_any(graph, inputs)

        if name == LOSS:
            assert function is not None
            # Dimensions that vary are marked in the first call; all others are static.
            sizes = None if dynamic else False
            checked = checked_backend(function, alone, backend)
            self.function = torch.compile(function, fullgraph=True, dynamic=sizes, backend=checked)
            return

        # A model that overrides `compile` compiles parts of itself, so every module may change.
        before = {module: compiled_call(module) for module in model.modules()}

        modules = blocks if name == BLOCKS else [model]
        for module in modules:
            # Such a model chooses its own options, and its `compile` need not take any.
            options = {} if compiles_itself(module) else {"dynamic": dynamic, "backend": backend}
            CallChain.of(module).compile(**options)

        # Those whose call is another one now, to undo exactly that.
        self._modules = [module for module, call in before.items() if compiled_call(module) is not call]

    def __call__(self, *args: Any) -> Any:
        """Call the compiled function with the model, without the links of the model's own call."""
        assert self.function is not None
        with CallChain.of(self.model).bypassed():
            return self.function(self.model, *args)

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Inside the `with` block, run the modules of this target eagerly, and no other compiled code."""
        # A compiled function has no modules: only `InstalledCode` calls it.
        with ExitStack() as stack:
            for module in self._modules:
                stack.enter_context(CallChain.of(module).bypassed())

            yield

    def remove(self) -> None:
        """Take the compiled code off the model. (A compiled loss was never put on it.)"""
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

    duck_shape_before = symbolic_shapes.use_duck_shape
    limit_before = dynamo.recompile_limit
    skip_before = dynamo.skip_nnmodule_hook_guards

    # Two dynamic dimensions that happen to be equal in the first batch may differ in the next.
    symbolic_shapes.use_duck_shape = False

    # Blocks that differ in a number, such as their index, are traced one by one. torch stops at 8, and would run the
    # rest eagerly.
    dynamo.recompile_limit = max(dynamo.recompile_limit, blocks + MOST_VERSIONS)

    notice_hooks()

    try:
        yield
    finally:
        dynamo.skip_nnmodule_hook_guards = skip_before
        symbolic_shapes.use_duck_shape = duck_shape_before
        dynamo.recompile_limit = limit_before


def notice_hooks() -> None:
    """Let code that is compiled from now on notice hooks that are added to a module, or removed, later.

    By default torch does not look, and the code would go on with the hooks of its first call.
    """
    torch._dynamo.config.skip_nnmodule_hook_guards = False
