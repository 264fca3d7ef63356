"""Callbacks of one class without names: a resumed run must list them in the same order, because they are numbered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.errors import UserError


class CallbackOrder:
    """Saves how each of these callbacks was made, and refuses a resume in which two have changed places.

    They are told apart by their plain attributes (numbers, texts, lists and dictionaries of these) before the start.
    Callbacks that cannot be told apart may change places.
    """

    def __init__(self, callbacks: Mapping[str, Sequence[Any]]):
        """`callbacks` are given by the name that they share, in the order of the list."""
        self._made = {name: [_plain_attributes(one) for one in sharing] for name, sharing in callbacks.items()}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._made)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, before in state.items():
            now = self._made.get(name, [])
            # The same attributes in another order: two callbacks have changed places. Other differences are intended
            # changes.
            if before != now and sorted(before) == sorted(now):
                raise UserError(
                    f"the callbacks {name} are in another order than in the checkpoint",
                    f"the first was made with {before[0]}, and is now made with {now[0]}; each would get the state of "
                    "another",
                    "list them in the order of before; for any order, give each its own name: self.name = '...'",
                )


def _plain_attributes(callback: Any) -> str:
    """Return the plain attributes as text, sorted by name."""
    attributes = sorted(vars(callback).items()) if hasattr(callback, "__dict__") else []
    return ", ".join(f"{name}={value!r}" for name, value in attributes if _is_plain(value))


def _is_plain(value: Any) -> bool:
    """Return whether a value has a text that says how it was made: no tensors, no objects."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))

    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))

    return value is None or isinstance(value, bool | int | float | str)
