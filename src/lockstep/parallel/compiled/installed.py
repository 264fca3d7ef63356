"""Compiled code in use: which calls it takes, how they are made, and how many calls did not fit.

A call that does not fit runs eagerly, which is right but slow. So from time to time the ranks check how many there
were, and the compiler compiles again if there were too many.

A compiled loss may be captured as a CUDA graph, which repeats kernels with the numbers and addresses of the call that
was captured. The attributes of the model are watched by the graphs themselves; those of a task, which a compiled loss
reads as well, are watched here (`Constants`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from lockstep.config import RunConfig
from lockstep.parallel.compiled.batch_sizes import Dims, Shape, fits
from lockstep.parallel.compiled.side_effects import Function
from lockstep.parallel.compiled.targets import Target
from lockstep.parallel.cudagraph.graphs import GraphedCall, graph_link
from lockstep.parallel.cudagraph.variants import RunLength
from lockstep.parallel.micro_batches import MicroBatchDriver
from lockstep.runtime.context import EventLogger

# After this many steps all ranks check how many batches did not fit, then after twice as many, up to the last check.
FIRST_CHECK, LAST_CHECK = 8, 1024

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, range)
DEEPEST = 4  # tuples in tuples

_UNKNOWN = object()


class InstalledCode:
    """The compiled code of a target, which runs in the place of eager code."""

    def __init__(self, target: Target, shapes: Sequence[Shape], dynamic: Dims):
        """Store the code.

        shapes: the shapes of the call that it was compiled for
        dynamic: the dimensions that may have other sizes
        """
        self.target = target
        self.dynamic = dynamic
        self._shapes = shapes

        # Of a compiled loss, if it is captured: the capture, and what the loss reads besides its arguments.
        self._graphed: GraphedCall | None = None
        self._constants: Constants | None = None

        # Since the last check: calls in all, and calls that did not fit.
        self._calls = 0
        self._misses = 0

        # Since the code was installed: steps in all, and the number of steps at which the ranks check next.
        self._steps = 0
        self._next_check = FIRST_CHECK

    def takes(self, shapes: Sequence[Shape]) -> bool:
        """Return whether a call with these shapes fits the compiled code, and count it."""
        # torch's guards find out as well, but they do not count it.
        fitting = fits(shapes, self._shapes, self.dynamic)
        self._calls += 1
        self._misses += not fitting
        return fitting

    @property
    def still_checks(self) -> bool:
        """Whether the ranks will check again how many calls did not fit."""
        return self._next_check <= LAST_CHECK

    def end_step(self) -> float | None:
        """Return the share of the calls since the last check that did not fit, if it is time for a check."""
        self._steps += 1
        if not self.still_checks or self._steps < self._next_check:
            return None

        self._next_check *= 2
        share = self._misses / max(1, self._calls)
        self._calls = 0
        self._misses = 0
        return share

    def run(self, call: Callable[[], Any]) -> Any:
        """Make a call that runs compiled code."""
        # Where torch's guards find that the code does not fit, eager code runs: one rank alone must not compile now.
        with torch.compiler.set_stance("eager_on_recompile"):
            return call()

    def call_function(self, args: tuple[Any, ...]) -> Any:
        """Call the compiled loss, or replay it."""
        # A capture repeats the values of its time, so it is used only while nothing has changed.
        if self._graphed and self._constants and self._constants.hold:
            return self._graphed(*args)

        return self.target(*args)

    def capture(
        self, function: Function, driver: MicroBatchDriver, config: RunConfig, log_event: EventLogger, length: RunLength
    ) -> None:
        """Capture the calls of a compiled loss from now on, if it reads nothing that may change."""
        # Asked now, and again before every replay.
        self._constants = Constants(function)
        if not self._constants.hold:
            reason = "not captured: the loss may read values that change (attributes of the task, globals)"
            log_event("graph", reason=reason)
            return

        # None if the settings or the model do not allow captures. The link is not installed on the model's call chain:
        # it wraps the compiled function, and `call_function` chooses it.
        self._graphed = graph_link(driver.model, config, driver.runtime, log_event, length)
        if self._graphed:
            self._graphed.inner = self.target

    def remove(self) -> None:
        """Return the model to its eager code, and free the memory of captures."""
        self._graphed = None  # the only reference to the captures
        self.target.remove()


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
