"""init=meta: a model that no single rank could hold is made without memory for its parameters, then filled and cut
block by block. Buffers, and tensors that are plain attributes, stay as their constructors make them.

Parameters are filled by the `reset_parameters()` of their modules, whole, in the host's memory, children before
parents: the order in which constructors draw their random numbers. So a model whose constructors only make modules
starts with the same bits as without init=meta, on any number of ranks. What a constructor does to parameters beside
that (`self.apply(init)`, say) would be lost: it is refused, unless a `reset_parameters()` does it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

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
    with _parameters_without_memory():
        return make()


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """A parameter is empty from the moment on that its module has it."""
    known: dict[int, tuple[ReferenceType[nn.Parameter], nn.Parameter]] = {}  # one that two modules share stays one

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta or is_lazy(parameter):
            return None
        original, empty = known.get(id(parameter), (None, None))
        if original is None or original() is not parameter:  # or another one, which lies where that one lay
            empty = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            known[id(parameter)] = ref(parameter), empty
        return empty

    handle = register_module_parameter_registration_hook(without_memory)  # pyrefly: ignore[bad-argument-type]
    try:
        yield
    finally:
        handle.remove()


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
    filling.finish(model)


class _Made(NamedTuple):
    """A parameter with memory, and the empty one that it replaces."""

    place: tuple[str, nn.Module, str]
    empty: nn.Parameter
    full: nn.Parameter
    before: int  # how often `full` had been changed when it was made


class _Filling:
    def __init__(self, blocks: set[int], cut: Callable[[nn.Module], Any]):
        self.blocks, self.cut = blocks, cut
        self._made: dict[int, _Made] = {}  # by what it replaces: tied parameters stay tied
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
            self.finish(module)
            self.cut(module)
            self._cut += module.parameters()

    def finish(self, module: nn.Module) -> None:
        """It is filled: let go of it, so that what is whole goes when it is cut."""
        inside = {id(p) for p in module.parameters()}
        for key, made in [(key, made) for key, made in self._made.items() if id(made.full) in inside]:
            name, owner, own_name = made.place
            if made.full._version - made.before < made.empty._version:
                found = f"does not set {own_name} as a constructor does, which changes it once more"
                raise _not_filled(name, owner, found, "do that in it, or in a reset_parameters() of its block")
            del self._made[key]

    def _fill_own(self, module: nn.Module, name: str) -> None:
        reset = _reset_of(module)
        if reset is None:
            return
        earlier, blank = self._make_room(module, name)
        versions = [p._version for p in self._cut]
        reset()
        for tensor, value in earlier:  # tied: drawn once more, as its constructor did, and forgotten again
            tensor.detach().copy_(value)
        if versions != [p._version for p in self._cut]:
            raise _not_filled(name, module, "sets blocks that have been cut already", "set them in the blocks' own")
        unset = [key for key in blank if _is_blank(getattr(module, key))]
        if unset:
            raise _not_filled(name, module, f"leaves {', '.join(unset)} unset", f"set {unset[0]} in it")

    def _make_room(self, module: nn.Module, name: str) -> tuple[list[tuple[nn.Parameter, Tensor]], list[str]]:
        """Memory for what is the module's own. Returns what an earlier module has filled already, with its values, and
        the names of all that had none."""
        earlier, empty = [], _own_empty(module)
        for key, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if made := self._made.get(id(old)):
                new = made.full
                earlier.append((new, new.detach().clone()))
            else:
                new = nn.Parameter(_blank(torch.empty_like(old, device="cpu")), old.requires_grad)
                self._made[id(old)] = _Made((name, module, key), old, new, new._version)
                self._replaced.append(old)
            setattr(module, key, new)  # not into `_parameters`: recurrent modules keep a list of their own
        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, key, _blank(torch.empty_like(buffer, device="cpu")))
        return earlier, list(empty)


def _check_can_be_filled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        own = _own_empty(module)
        lost = [key for key, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]
        lost += [key for key, value in own.items() if value.dtype == torch.bool]  # nothing tells a set one from a blank
        if lost:
            raise _not_filled(name, module, f"keeps {lost[0]}, which is made in its constructor", "make it in forward")
        if own and _reset_of(module) is None:
            raise _not_filled(name, module, "has none", f"write one that sets {', '.join(own)}")


def _own_empty(module: nn.Module) -> dict[str, Tensor]:
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {name: tensor for name, tensor in own if tensor.is_meta}


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
