"""What a function reads besides its arguments, if that can be known: a capture is no longer valid when that changes.

A CUDA graph repeats kernels with the numbers and addresses of the call that was captured. The attributes of the model
are watched by the graphs themselves; those of a task, which a compiled loss reads as well, are watched here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, range)
DEEPEST = 4  # tuples in tuples

_UNKNOWN = object()


class Constants:
    """The attributes of a task and the globals that its loss reads, itself or in a function that it calls."""

    def __init__(self, function: Callable[..., Any]):
        """Read the code of `function`, usually a bound method: the `loss` of a task."""
        self._owner = getattr(function, "__self__", None)
        self._attributes: set[str] = set()  # names of attributes of the owner
        self._globals: list[tuple[dict[str, Any], str]] = []  # (globals of a module, name in them)

        # The code is read once. What it reads is read again before every replay, see `hold`.
        code = inspect.unwrap(getattr(function, "__func__", function))
        is_method = self._owner is not None and isinstance(code, FunctionType)
        self._is_known = is_method and self._read_code(code)
        self._before = self._values()

    @property
    def hold(self) -> bool:
        """Whether all that the function reads is known, and has the same values as in the beginning."""
        return self._is_known and self._before is not None and self._values() == self._before

    def _values(self) -> list[Any] | None:
        """Return the values of all attributes and globals, or None if one of them is no plain value."""
        # Always in the same order, because the list is compared with an earlier one.
        found = [_plain(getattr(self._owner, name, None)) for name in sorted(self._attributes)]
        found += [_plain(scope.get(name)) for scope, name in self._globals]

        return None if any(value is _UNKNOWN for value in found) else found

    def _read_code(self, first: FunctionType) -> bool:
        """Note what a function reads, with all functions that it calls. Return whether all of that is known."""
        # A list rather than recursion: functions may call each other.
        functions = [first]
        seen = set()
        while functions:
            function = functions.pop()
            if function.__code__ in seen:
                continue

            seen.add(function.__code__)
            names = _names(function.__code__)

            # A closure may hold anything. `__class__` is there only for super().
            if set(function.__code__.co_freevars) - {"__class__"}:
                return False

            # With these, the name of what is read may be computed, and then it is not among `names`.
            if names & {"getattr", "vars", "__dict__", "globals"}:
                return False

            # The bytecode does not tell attributes from globals, so each name is looked up as both.
            for name in names:
                functions += self._note_attribute(name)

                # Modules, classes and built-in functions do not change. What a function of torch reads is torch's.
                value = function.__globals__.get(name)
                if isinstance(value, FunctionType) and not value.__module__.startswith("torch"):
                    functions.append(value)  # read it as well
                elif isinstance(value, PLAIN):
                    self._globals.append((function.__globals__, name))
                elif not isinstance(value, ModuleType | type | FunctionType | BuiltinFunctionType):
                    return False

        return True

    def _note_attribute(self, name: str) -> list[FunctionType]:
        """Note a name if it is an attribute of the task. Return the function to read, if it is a method or property."""
        # Statically, so that no property runs.
        value = inspect.getattr_static(self._owner, name, None)

        # A method, a static or class method, or a property: its code is read.
        for code in (value, getattr(value, "__func__", None), getattr(value, "fget", None)):
            if isinstance(code, FunctionType):
                return [code]

        if value is not None:
            self._attributes.add(name)

        return []


def _names(code: CodeType) -> set[str]:
    """Return all names that a function may read, with those of the functions inside it."""
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a value that can be compared with a later one, with its type: 1 is not True."""
    if isinstance(value, PLAIN):
        return type(value), value

    if type(value) in (tuple, list) and depth < DEEPEST:
        parts = [_plain(part, depth + 1) for part in value]
        return _UNKNOWN if any(part is _UNKNOWN for part in parts) else (type(value), parts)

    return _UNKNOWN
