"""The state of a torch scheduler as a checkpoint holds it, and what it was made with, to notice a change on resume."""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch.optim.lr_scheduler import LRScheduler

from lockstep.optim.schedule import set_rate

# Where a scheduler is, as opposed to what it was made with. Schedulers that know one set it from `last_epoch`.
POSITION = ("last_epoch", "_step_count", "_is_initial", "_get_lr_called_within_step", "_last_lr")


def state_of(scheduler: LRScheduler) -> dict[str, Any]:
    """Return the state of a scheduler. One that holds another, as a warm-up around it may, holds the other's state."""
    state = {key: value for key, value in scheduler.state_dict().items() if key != "step"}  # `step` is our refusal
    return {key: _copied(value) for key, value in state.items()}


def _copied(value: Any) -> Any:
    """Return a copy whose containers the scheduler does not share: it changes some of them in place."""
    match value:
        case LRScheduler():
            return state_of(value)
        case Counter():
            return value.copy()
        case dict():
            return {key: _copied(item) for key, item in value.items()}
        case list():
            return [_copied(item) for item in value]
    return value


def load(scheduler: LRScheduler, saved: dict[str, Any]) -> None:
    own = scheduler.state_dict()
    scheduler.load_state_dict({key: _like(own.get(key), value) for key, value in saved.items()})


def _like(own: Any, saved: Any) -> Any:
    """Return what a checkpoint made plain as what it was: a Counter, as MultiStepLR has one; a scheduler inside."""
    if isinstance(own, LRScheduler):
        load(own, saved)
        return own

    if isinstance(own, Counter):
        return Counter(saved)
    if isinstance(own, dict) and isinstance(saved, dict):
        return {key: _like(own.get(key), value) for key, value in saved.items()}

    # SequentialLR and ChainedScheduler hold a list of states.
    if isinstance(own, list) and isinstance(saved, list) and len(own) == len(saved):
        return [_like(*pair) for pair in zip(own, saved, strict=True)]
    return _copied(saved)


class Beginning:
    """What schedulers and their parameter groups were when the user's code had made them."""

    def __init__(self, schedulers: list[LRScheduler], groups: list[dict[str, Any]]):
        self.states = [state_of(scheduler) for scheduler in schedulers]
        self._functions = [_function_settings(scheduler) for scheduler in schedulers]
        # OneCycleLR and CyclicLR also set momenta, and keep their bounds in the groups.
        self._options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self._rates = [float(group["lr"]) for group in groups]

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it, to be compared when the run is resumed."""
        return {"states": self.states, "functions": self._functions, "rates": self._rates}

    def changes(self, number: int, kind: str, saved: Mapping[str, Any], by_evaluations: bool) -> list[str]:
        """Return as text what the scheduler of this number is made with now, and was not when the run began."""
        then = {"": saved["states"][number], "function": saved["functions"][number]}
        now = {"": self.states[number], "function": self._functions[number]}
        found = [*_differences("", then, now)]
        if by_evaluations and saved["rates"] != self._rates:  # it keeps no rates of its own
            found.append(("lr", saved["rates"], self._rates))

        # A private number follows from a public one, which says more.
        public = [change for change in found if not any(part.startswith("_") for part in change[0].split("."))]
        return [f"{kind}: {key} {before} -> {after}" for key, before, after in public or found]

    def starts_at(self, number: int) -> Any:
        return self.states[number].get("last_epoch")

    def restore(self, schedulers: list[LRScheduler], groups: list[dict[str, Any]]) -> None:
        """Put schedulers and groups back to their beginning."""
        for scheduler, state in zip(schedulers, self.states, strict=True):
            load(scheduler, state)
        for group, options, rate in zip(groups, self._options, self._rates, strict=True):
            group.update({key: value for key, value in options.items() if key != "lr"})
            set_rate(group, rate)


def _differences(name: str, then: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value then and value now of everything that differs in two nested states."""
    if name.rpartition(".")[2] in POSITION:
        return

    if isinstance(then, dict) and isinstance(now, dict) and not isinstance(now, Counter):
        for key in [*then, *(key for key in now if key not in then)]:
            yield from _differences(f"{name}.{key}" if name else str(key), then.get(key), now.get(key))
    elif (
        isinstance(then, list) and isinstance(now, list) and len(then) == len(now) and isinstance((now or [0])[0], dict)
    ):
        for index, pair in enumerate(zip(then, now, strict=True)):
            yield from _differences(f"{name}.{index}", *pair)
    elif repr(_plain(then)) != repr(_plain(now)):
        yield name, _plain(then), _plain(now)


def _plain(value: Any) -> Any:
    """Return a value as a checkpoint reads it back: numpy's numbers as Python's, tuples as lists."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return dict(value) if isinstance(value, Counter) else value


def _function_settings(scheduler: LRScheduler) -> list[dict[str, Any]]:
    """Return the numbers that LambdaLR's functions hold: its state has those of objects only.

    transformers' schedules are such functions, with the number of steps as an argument.
    """
    return [_held_by(function) for function in getattr(scheduler, "lr_lambdas", ())]


def _held_by(function: Any) -> dict[str, Any]:
    if isinstance(function, functools.partial):
        held = {**dict(enumerate(function.args)), **function.keywords}
    elif isinstance(function, types.FunctionType):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        held = {name: _content(cell) for name, cell in cells}
    else:
        return {}
    return {str(name): value for name, value in held.items() if isinstance(value, bool | int | float | str)}


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
