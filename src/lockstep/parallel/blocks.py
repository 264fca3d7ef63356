"""The repeated parts of a model, such as the layers of a transformer: what is gathered, recomputed or cut as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from lockstep.errors import UserError


def find_blocks(model: nn.Module, named: Sequence[str] | None = None) -> list[nn.Module]:
    """The modules of the classes `named` (or of subclasses: cutting makes some), or else the children of every list of
    equal modules. May be none at all."""
    if named:
        found = [module for module in model.modules() if any(kind.__name__ in named for kind in type(module).__mro__)]
        if not found:
            classes = sorted(
                {type(module).__name__ for module in model.modules() if any(True for _ in module.children())}
            )
            raise UserError(
                f"blocks of class {', '.join(named)}",
                "no such module in the model",
                f"use one of: {', '.join(classes)}",
            )
        return _outermost(found)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    repeated = [list(holder) for holder in lists if len(holder) > 1 and len({type(m) for m in holder}) == 1]
    return _outermost([module for children in repeated for module in children if _has_parameters(module)])


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


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Without those that lie inside another one."""
    inside = {id(inner) for module in modules for inner in module.modules() if inner is not module}
    unique = {id(module): module for module in modules if id(module) not in inside}
    return list(unique.values())
