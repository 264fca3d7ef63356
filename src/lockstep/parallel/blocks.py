"""Blocks: the repeated parts of a model (transformer layers, say), each gathered, recomputed or staged as a unit.

They are named by their classes, or found: the members of every list whose members all have the same class. FSDP gathers
a block at a time, rematerialisation drops the activations of a block at a time, and a pipeline is cut between blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lockstep.errors import UserError, nearest_name


def find_blocks(model: nn.Module, named: Sequence[str] | None = None) -> list[nn.Module]:
    """Return the blocks of `model`, which may be none at all.

    With `named`, they are the modules of these classes or of subclasses (torch derives some when it shards). Without
    it, they are the members of every ModuleList or Sequential whose members all have the same class.
    """
    if named:
        classes = {module: _class_names(module) for module in _candidates(model)}
        # A misspelt class must not silently leave its modules out.
        for name in named:
            if not any(name in names for names in classes.values()):
                raise _no_such_blocks(name, model)

        return _outermost([module for module, names in classes.items() if names.intersection(named)])

    # A list with a single member repeats nothing, and a list of different classes is a sequence of different layers.
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    repeated = [members for members in lists if len(members) > 1 and len(set(map(_user_class, members))) == 1]
    modules = [module for members in repeated for module in members]
    return _outermost([module for module in modules if _has_forward(module) and _has_parameters(module)])


def blocks_without_shared_parameters(blocks: Sequence[nn.Module], model: nn.Module) -> list[nn.Module]:
    """Return the blocks that share no parameter with another block or with the rest of `model`.

    A parameter can be sharded with one module only, so the other blocks are sharded together with the rest.
    """
    # A module may have several names: one inside a block, and one outside.
    named = list(model.named_modules(remove_duplicate=False))
    block_ids = {id(block) for block in blocks}
    block_prefixes = tuple(f"{name}." for name, module in named if id(module) in block_ids)

    # A module inside a block also counts as outside if it has a second name there.
    outside = [module for name, module in named if not f"{name}.".startswith(block_prefixes)]

    # Count how many owners each parameter has. Every block is one owner, and everything outside is one together.
    block_parameters = [{id(p) for p in block.parameters()} for block in blocks]
    owners = Counter(parameter for parameters in block_parameters for parameter in parameters)
    owners.update({id(p) for module in outside for p in module._parameters.values() if p is not None})

    shared = {parameter for parameter, count in owners.items() if count > 1}
    pairs = zip(blocks, block_parameters, strict=True)
    return [block for block, parameters in pairs if shared.isdisjoint(parameters)]


def class_name(module: nn.Module) -> str:
    return _user_class(module).__name__


def suggest_block_class(model: nn.Module, typed: str = "") -> str | None:
    """Return the name of a class to suggest for the setting `blocks`; None if the model has no submodules.

    It is the name closest to what the user `typed`, or else the class of the detected blocks, or else the class of the
    largest submodule.
    """
    parts = [module for module in _candidates(model) if _has_parameters(module)]
    blocks = find_blocks(model)

    # Layers without children (nn.Linear, ...) are poor blocks and are suggested only if there is nothing else.
    with_children = [module for module in parts if any(True for _ in module.children())]
    likely = with_children + blocks or parts

    near = nearest_name(typed, sorted({class_name(module) for module in likely}))
    if near is not None:
        return near

    largest_first = sorted(parts, key=lambda module: -sum(p.numel() for p in module.parameters()))
    return next((class_name(module) for module in [*blocks, *largest_first]), None)


def _no_such_blocks(name: str, model: nn.Module) -> UserError:
    """Return the error for a class that names no blocks, with the nearest that does."""
    of_class = [module for module in model.modules() if name in _class_names(module)]

    if model in of_class:
        why = f"{name} is the model itself, and a block is a part of it"
    elif of_class:
        why = f"{name} is only a container of modules: it has no forward"
    else:
        why = "the model contains no module of this class"

    suggestion = suggest_block_class(model, name)
    fix = f"set blocks=[{suggestion}]" if suggestion else "leave blocks out"
    return UserError(f"blocks=[{name}] names no blocks of {type(model).__name__}", why, fix)


def _candidates(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if module is not model and _has_forward(module)]


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward  # false for ModuleList and ModuleDict


def _user_class(module: nn.Module) -> type:
    """Return the class as the user wrote it. FSDP replaces a module's class with a subclass of it."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def _class_names(module: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__}


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Drop modules that lie inside another one: a block inside a block would be gathered, or recomputed, twice."""
    inside = {id(inner) for module in modules for inner in module.modules() if inner is not module}
    return list(dict.fromkeys(module for module in modules if id(module) not in inside))
