"""What modules keep besides parameters, buffers and parts. A forward may read it, which makes it another way of calling
the model; and it may set it, which a replay would not do."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

# What torch itself keeps there; hooks are looked at elsewhere.
TORCHS = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype})


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in TORCHS}


class Held:
    """What modules keep, to be looked at in every call: plain values, tensors, and what can be called. Other objects (a
    list, a configuration) may be exchanged, and changed inside, unseen."""

    def __init__(self, modules: Iterable[nn.Module]):
        self._modules = [*modules]
        self._everywhere = [held for m in self._modules for held in (vars(m), m._modules)]
        self._sizes: list[int] = []
        self._last: list[Any] = []
        self._told: tuple[Hashable, ...] = ()
        self.look()

    def settings(self) -> Hashable:
        """The plain values (a temperature, a probability)."""
        values = [held.get(name) for held, name in self._plain]
        if not same_objects(values, self._last):  # nearly always they are
            self._last = values
            self._told = (*(value if type(value) in PLAIN else type(value) for value in values),)
        return self._told

    def tensors(self) -> list[Tensor]:
        """Those that are neither parameters nor buffers."""
        return [value for held, name in self._loose if isinstance(value := held.get(name), Tensor)]

    def parts(self) -> list[Any]:
        """Modules, and what can be called: a forward that was put in the place of the class's, say."""
        return [held.get(name) for held, name in self._callable]

    def look(self) -> None:
        """Where everything is, before asking for it: names may have come or gone."""
        sizes = [*map(len, self._everywhere)]
        if sizes == self._sizes:
            return
        self._sizes = sizes
        own = [(vars(m), name, value) for m in self._modules for name, value in _own(m).items()]
        parts = [(m._modules, name) for m in self._modules for name in m._modules]
        self._plain = [(held, name) for held, name, value in own if type(value) in PLAIN]
        self._loose = [(held, name) for held, name, value in own if type(value) is Tensor]
        self._callable = [*((held, name) for held, name, value in own if callable(value)), *parts]


def same_objects(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


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
