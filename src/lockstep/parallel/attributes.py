"""What modules keep besides parameters, buffers and parts. A forward may read it, which makes it another way of calling
the model; and it may set it, which a replay would not do."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

# What torch itself keeps there; hooks are looked at elsewhere.
TORCHS = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype})


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in TORCHS}


class Settings:
    """Plain values that modules have from the beginning (a temperature, a probability), to be looked at in every call.
    What lies inside other objects is not seen."""

    def __init__(self, modules: Iterable[nn.Module]):
        self._places = [(vars(m), name) for m in modules for name, value in _own(m).items() if type(value) in PLAIN]
        self._last: list[Any] = [self] * len(self._places)  # none of them
        self._told: tuple[Hashable, ...] = ()

    def now(self) -> Hashable:
        values = [held.get(name) for held, name in self._places]
        if not all(map(is_, values, self._last)):  # nearly always they are the same objects
            self._last = values
            self._told = (*(value if type(value) in PLAIN else type(value) for value in values),)
        return self._told


def loose_tensors(modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str]]:
    """Where the tensors are that are neither parameters nor buffers: a dictionary and a name."""
    return [(vars(m), name) for m in modules for name, value in _own(m).items() if type(value) is Tensor]


class Attributes:
    """All of a model's, as they are now, to come back to."""

    def __init__(self, model: nn.Module):
        self._before = [
            (module, {name: (value, _shallow(value)) for name, value in _own(module).items()})
            for module in model.modules()
        ]

    def changed(self) -> list[str]:
        """The names of those that are new, are other objects, or hold others."""
        return [
            f"{type(module).__name__}.{name}"
            for module, before in self._before
            for name, value in _own(module).items()
            if name not in before or not _intact(value, *before[name])
        ]

    def restore(self) -> None:
        for module, before in self._before:
            for name in _own(module).keys() - before.keys():
                del vars(module)[name]
            for name, (value, held) in before.items():
                vars(module)[name] = value
                if isinstance(value, list):
                    value[:] = held
                elif held is not None:
                    value.clear()
                    value.update(held)


def _shallow(value: Any) -> Any:
    """A copy of what can be changed in place; None for the rest."""
    return copy.copy(value) if type(value) in (list, dict) else None


def _intact(now: Any, before: Any, held: Any) -> bool:
    if now is not before:
        return type(now) is type(before) and type(now) in PLAIN and now == before
    return held is None or [*map(id, _parts(now))] == [*map(id, _parts(held))]


def _parts(held: Any) -> list[Any]:
    return [*held, *held.values()] if isinstance(held, dict) else held
