"""Compile a target in place, and take the compiled code away again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_shapes
from torch import nn

from lockstep.parallel.blocks import find_blocks
from lockstep.parallel.call_chain import CallChain
from lockstep.parallel.compiled.decision import BLOCKS, LOSS

Function = Callable[..., Any]  # (model, *args), such as a task's loss


class Target:
    """The compiled code of one target. It stays on the model until `remove`."""

    def __init__(self, name: str, model: nn.Module, function: Function | None, dynamic: bool):
        self.name = name
        self.model = model
        self.function: Function | None = None  # the compiled function, if the target is the loss
        self._modules: list[nn.Module] = []

        if name == LOSS:
            assert function is not None
            # Dimensions that vary are marked in the first call; all others are static.
            self.function = torch.compile(function, fullgraph=True, dynamic=None if dynamic else False)
            return

        # A model that overrides `compile` compiles parts of itself, so every module may change.
        before = {module: compiled_call(module) for module in model.modules()}
        for module in find_blocks(model) if name == BLOCKS else [model]:
            own = type(module).compile is not nn.Module.compile
            CallChain.of(module).compile(**({} if own else {"dynamic": dynamic}))

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
def separate_sizes() -> Iterator[None]:
    """Compile so that two dynamic dimensions which happen to be equal in the first batch may differ in the next."""
    before = symbolic_shapes.use_duck_shape
    symbolic_shapes.use_duck_shape = False
    try:
        yield
    finally:
        symbolic_shapes.use_duck_shape = before
