"""init=meta: a model that no single rank could hold is made without memory, then filled and cut block by block.

Modules are filled by their own `reset_parameters()`, whole, in the host's memory, children before parents: the order in
which constructors draw their random numbers. So a model whose constructors only make modules starts with the same bits
as without init=meta, on any number of ranks. One that draws numbers of its own on the way (`self.apply(init)`, say)
starts differently, unless a `reset_parameters()` does that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import RunConfig
from lockstep.errors import UserError
from lockstep.runtime.context import Runtime
from lockstep.runtime.seeds import derive, seed_torch

CUTTING = ("fsdp", "fsdp-grads", "hsdp")


def make_model(make: Callable[[], nn.Module], config: RunConfig) -> nn.Module:
    """`make()`, or with init=meta its empty shape."""
    if config.init != "meta":
        return make()
    _check_strategy(config)
    with torch.device("meta"):
        return make()


def _check_strategy(config: RunConfig) -> None:
    if config.strategy not in CUTTING or config.mesh.tp or config.mesh.pp:
        raise UserError(
            f"init=meta with strategy={config.strategy}" + " and a mesh" * bool(config.mesh.tp or config.mesh.pp),
            "ranks that hold layers whole, or cut them in another way, and would need the weights first",
            "leave the mesh out, or type init=host"
            if config.strategy in CUTTING
            else "type strategy=fsdp, or init=host",
        )


def check_made_as_asked(model: nn.Module, config: RunConfig) -> None:
    """In a loop of the user's own, the user makes the model."""
    empty = [p.is_meta for p in model.parameters()]
    if config.init == "meta":
        _check_strategy(config)
    if config.init == "meta" and not all(empty):
        raise UserError(
            "init=meta", "a model with weights in it", "make it in `with torch.device('meta'):`, or type init=host"
        )
    if config.init != "meta" and any(empty):
        raise UserError("init=host", "a model without weights, made on the meta device", "type init=meta")


def fill(
    model: nn.Module, blocks: Iterable[nn.Module], cut: Callable[[nn.Module], Any], seed: int, runtime: Runtime
) -> None:
    """Give `model` its weights, the same on every rank; a block is cut as soon as it is whole."""
    seed_torch(derive(seed, "init"), runtime.device)
    _check_can_be_filled(model)
    filling = _Filling({id(block) for block in blocks}, cut)
    filling.fill(model, "")


class _Filling:
    def __init__(self, blocks: set[int], cut: Callable[[nn.Module], Any]):
        self.blocks, self.cut = blocks, cut
        self._made: dict[int, nn.Parameter] = {}  # by what it replaces: tied parameters stay tied
        self._replaced: list[nn.Parameter] = []  # kept, so that no two of them ever have the same id
        self._done: set[int] = set()
        self._cut: list[nn.Parameter] = []

    def fill(self, module: nn.Module, name: str) -> None:
        if id(module) in self._done:
            return
        self._done.add(id(module))
        for child_name, child in module.named_children():
            self.fill(child, f"{name}.{child_name}" if name else child_name)
        self._fill_own(module, name)
        if id(module) in self.blocks:
            self.cut(module)
            self._cut += module.parameters()

    def _fill_own(self, module: nn.Module, name: str) -> None:
        reset = _reset_of(module)
        if reset is None:
            return
        earlier = self._make_room(module)
        versions = [p._version for p in self._cut]
        reset()
        for tensor, value in earlier:  # tied: drawn once more, as its constructor did, and forgotten again
            tensor.detach().copy_(value)
        if versions != [p._version for p in self._cut]:
            raise _not_filled(name, module, "sets blocks that have been cut already", "set them in the blocks' own")
        unset = [key for key, tensor in _own(module).items() if _is_blank(tensor)]
        if unset:
            raise _not_filled(name, module, f"leaves {', '.join(unset)} unset", f"set {unset[0]} in it")

    def _make_room(self, module: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
        """Memory for what is the module's own. Returns what an earlier module has filled already, and its values."""
        earlier = []
        for key, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            new = self._made.get(id(old))
            if new is not None:
                earlier.append((new, new.detach().clone()))
            else:
                blank = _blank(torch.empty_like(old, device="cpu"))
                new = self._made[id(old)] = nn.Parameter(blank, old.requires_grad)
                self._replaced.append(old)
            setattr(module, key, new)  # not into `_parameters`: recurrent modules keep a list of their own
        for key, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, key, _blank(torch.empty_like(buffer, device="cpu")))
        return earlier


def _check_can_be_filled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        own = _own(module)
        lost = [key for key, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]
        lost += [key for key, value in own.items() if value.dtype == torch.bool]  # nothing tells a set one from a blank
        if lost:
            raise _not_filled(name, module, f"keeps {lost[0]}, which is made in its constructor", "make it in forward")
        if own and _reset_of(module) is None:
            raise _not_filled(name, module, "has none", f"write one that sets {', '.join(own)}")


def _own(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    """torch's attention has it under a private name."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _blank(tensor: Tensor) -> Tensor:
    """A value that nobody sets."""
    inexact = tensor.is_floating_point() or tensor.is_complex()
    return tensor.fill_(torch.nan if inexact else torch.iinfo(tensor.dtype).min)


def _is_blank(tensor: Tensor) -> bool:
    tensor = tensor.detach()
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return bool((tensor == torch.iinfo(tensor.dtype).min).any())


def _not_filled(name: str, module: nn.Module, found: str, fix: str) -> UserError:
    kind = type(module).__name__
    return UserError(
        "init=meta: every module with weights has a reset_parameters() that sets them all",
        f"{kind}{f' ({name})' if name else ''} {found}",
        f"{fix}; or type init=host",
    )
