"""The attributes of modules besides parameters and buffers, checked in every call.

A forward may read them. So a changed value means another variant of the call, or invalidates a capture.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn

from lockstep.parallel.call_state import PLAIN_TYPES, own_attributes


class AttributeWatch:
    """The plain values, tensors and callables that `modules` have as attributes.

    A change of any other object (a list, a configuration) is not noticed.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        self._modules = list(modules)
        # The modules' own dicts. Comparing their sizes is a cheap test for added or deleted attributes.
        self._dicts = [namespace for m in self._modules for namespace in (vars(m), m._modules)]
        self._sizes: list[int] = []

        # The last result of `settings`, and the values that it was built from.
        self._last_values: list[Any] = []
        self._last_key: tuple[Hashable, ...] = ()
        self.refresh()

    def refresh(self) -> None:
        """Find all attributes again if any was added or deleted. Must be called before the values are read."""
        sizes = list(map(len, self._dicts))
        if sizes == self._sizes:
            return

        self._sizes = sizes

        # Group attributes by the type of their value. Other types are not watched.
        slots = [(vars(m), name, value) for m in self._modules for name, value in own_attributes(m).items()]
        self._plain = [(namespace, name) for namespace, name, value in slots if type(value) in PLAIN_TYPES]
        self._tensors = [(namespace, name) for namespace, name, value in slots if type(value) is Tensor]

        # A forward calls submodules too.
        submodules = [(m._modules, name) for m in self._modules for name in m._modules]
        self._callables = [(namespace, name) for namespace, name, value in slots if callable(value)] + submodules

    def settings(self) -> Hashable:
        """Return the plain values (a temperature, a probability) as a key."""
        # `get`, because an attribute may have been deleted. None then counts as a changed value.
        values = [namespace.get(name) for namespace, name in self._plain]

        # Usually nothing has changed, and this comparison is cheaper than building the key.
        if not same_objects(values, self._last_values):
            self._last_values = values
            self._last_key = tuple(value if type(value) in PLAIN_TYPES else type(value) for value in values)

        return self._last_key

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are neither parameters nor buffers."""
        values = [namespace.get(name) for namespace, name in self._tensors]
        return [value for value in values if isinstance(value, Tensor)]

    def callables(self) -> list[Any]:
        """Return submodules, and functions such as a `forward` that was set on an instance."""
        return [namespace.get(name) for namespace, name in self._callables]


def same_objects(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(is_, left, right))
