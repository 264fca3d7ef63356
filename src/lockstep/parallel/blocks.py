"""Blocks: the repeated parts of a model (transformer layers, say), each gathered, recomputed or staged as a unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from difflib import get_close_matches

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lockstep.errors import UserError


def find_blocks(model: nn.Module, named: Sequence[str] | None = None) -> list[nn.Module]:
    """Return the blocks of `model`, which may be none at all.

    With `named` they are the modules of these classes, or of subclasses (sharding makes some). Without it they are the
    members of every list of modules of one class.
    """
    if named:
        classes = {module: _class_names(module) for module in _candidates(model)}
        # A misspelt class must not silently leave its modules out.
        for word in named:
            if not any(word in names for names in classes.values()):
                raise _no_such_blocks(word, model)

        return _outermost([module for module, names in classes.items() if names.intersection(named)])

    # A list of one module repeats nothing, and a list of several classes is a sequence of different steps.
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    repeated = [members for members in lists if len(members) > 1 and len(set(map(_user_class, members))) == 1]
    modules = [module for members in repeated for module in members]
    return _outermost([module for module in modules if _has_forward(module) and _has_parameters(module)])


def without_shared(blocks: Sequence[nn.Module], model: nn.Module) -> list[nn.Module]:
    """Return the blocks that share no parameter with another block or with the rest of `model`.

    A parameter can be sharded with one module only, so the other blocks are sharded together with the rest.
    """
    # A module may have several names: one inside a block, and one outside.
    named = list(model.named_modules(remove_duplicate=False))
    block_ids = {id(block) for block in blocks}
    block_prefixes = tuple(f"{name}." for name, module in named if id(module) in block_ids)

    # A module inside a block counts here if it also has a name outside.
    outside = [module for name, module in named if not f"{name}.".startswith(block_prefixes)]

    # Count the holders of each parameter: blocks count once each, all the rest together once.
    of_blocks = [{id(p) for p in block.parameters()} for block in blocks]
    holders = Counter(parameter for parameters in of_blocks for parameter in parameters)
    holders.update({id(p) for module in outside for p in module._parameters.values() if p is not None})

    shared = {parameter for parameter, count in holders.items() if count > 1}
    return [block for block, parameters in zip(blocks, of_blocks, strict=True) if shared.isdisjoint(parameters)]


def class_name(module: nn.Module) -> str:
    return _user_class(module).__name__


def class_to_name(model: nn.Module, typed: str = "") -> str | None:
    """Return a class to propose for the setting `blocks`; None if the model has no parts.

    It is one with a name close to what the user `typed`, or else the class of the blocks that we would find, or
    that of the largest part.
    """
    parts = [module for module in _candidates(model) if _has_parameters(module)]
    blocks = find_blocks(model)

    # Layers without children (nn.Linear, ...) are poor blocks and are proposed only if there is nothing else.
    likely = [module for module in parts if any(True for _ in module.children())] + blocks or parts

    if close := get_close_matches(typed, sorted({class_name(module) for module in likely}), 1):
        return close[0]

    largest_first = sorted(parts, key=lambda module: -sum(p.numel() for p in module.parameters()))
    return next((class_name(module) for module in [*blocks, *largest_first]), None)


def _no_such_blocks(word: str, model: nn.Module) -> UserError:
    of_class = [module for module in model.modules() if word in _class_names(module)]

    if model in of_class:
        why = "that is the model itself, which is no part of it"
    elif of_class:
        why = f"a {word} holds modules, and has no forward that could be computed as one"
    else:
        why = "there is no such module in the model"

    proposed = class_to_name(model, word)
    fix = f"type blocks=[{proposed}]" if proposed else "leave blocks out"
    return UserError(f"blocks=[{word}] names no blocks of {type(model).__name__}", why, fix)


def _candidates(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if module is not model and _has_forward(module)]


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward  # lists and dicts of modules have none


def _user_class(module: nn.Module) -> type:
    """Return the class as the user wrote it: torch derives a class from it when it shards a module."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def _class_names(module: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__}


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Drop modules that lie inside another one: a block inside a block would be gathered, or recomputed, twice."""
    inside = {id(inner) for module in modules for inner in module.modules() if inner is not module}
    return list(dict.fromkeys(module for module in modules if id(module) not in inside))
