"""The repeated parts of a model, such as the layers of a transformer: what is gathered, recomputed or cut as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from difflib import get_close_matches

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lockstep.errors import UserError


def find_blocks(model: nn.Module, named: Sequence[str] | None = None) -> list[nn.Module]:
    """The modules of the classes `named` (or of subclasses: cutting makes some), or else the children of every list of
    equal modules. May be none at all."""
    if named:
        classes = {module: _classes(module) for module in _parts(model)}
        for word in named:
            if not any(word in found for found in classes.values()):
                raise _no_blocks(word, model)
        return _outermost([module for module, found in classes.items() if found.intersection(named)])
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    repeated = [list(holder) for holder in lists if len(holder) > 1 and len({_own_class(m) for m in holder}) == 1]
    children = [module for held in repeated for module in held]
    return _outermost([module for module in children if _is_called(module) and _has_parameters(module)])


def without_shared(blocks: Sequence[nn.Module], whole: nn.Module) -> list[nn.Module]:
    """A parameter is cut with one part only. Blocks that share one with another block, or with the rest of `whole`, are
    left out: they are cut together with that."""
    places = list(whole.named_modules(remove_duplicate=False))  # a module may have several
    of_blocks = {id(block) for block in blocks}
    inside = (*(f"{place}." for place, module in places if id(module) in of_blocks),)
    rest = [module for place, module in places if not f"{place}.".startswith(inside)]
    holders = [{id(p) for p in block.parameters()} for block in blocks]
    times = Counter(place for holder in holders for place in holder)
    times.update({id(p) for module in rest for p in module._parameters.values() if p is not None})
    return [block for block, holder in zip(blocks, holders, strict=True) if all(times[place] == 1 for place in holder)]


def class_name(module: nn.Module) -> str:
    return _own_class(module).__name__


def class_to_name(model: nn.Module, typed: str = "") -> str | None:
    """What to type in `blocks`: what comes close to what was `typed`, or the class of the blocks that we would find, or
    that of the largest part. None: the model has no parts."""
    parts = [module for module in _parts(model) if _has_parameters(module)]
    holders = [module for module in parts if any(True for _ in module.children())]
    likely = [*holders, *find_blocks(model)] or parts
    if close := get_close_matches(typed, sorted({class_name(module) for module in likely}), 1):
        return close[0]
    largest = max(parts, key=lambda module: sum(p.numel() for p in module.parameters()), default=None)
    chosen = next(iter(find_blocks(model)), largest)
    return class_name(chosen) if chosen is not None else None


def _no_blocks(word: str, model: nn.Module) -> UserError:
    of_class = [module for module in model.modules() if word in _classes(module)]
    found = "no such module in the model"
    if of_class:
        found = f"a {word} holds modules, and has no forward that could be computed as one"
    if model in of_class:
        found = "the model itself, which is no part of it"
    proposed = class_to_name(model, word)
    return UserError(f"blocks of class {word}", found, f"type blocks=[{proposed}]" if proposed else "leave blocks out")


def _parts(model: nn.Module) -> list[nn.Module]:
    """What may be a block."""
    return [module for module in model.modules() if module is not model and _is_called(module)]


def _is_called(module: nn.Module) -> bool:
    """As lists and dicts of modules are not: they have no forward."""
    return type(module).forward is not nn.Module.forward


def _own_class(module: nn.Module) -> type:
    """As the user wrote it: torch makes a class of its own for what it has cut."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def _classes(module: nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__}


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Without those that lie inside another one."""
    inside = {id(inner) for module in modules for inner in module.modules() if inner is not module}
    unique = {id(module): module for module in modules if id(module) not in inside}
    return list(unique.values())
