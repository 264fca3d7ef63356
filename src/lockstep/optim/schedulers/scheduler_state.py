"""The state of a torch scheduler in a checkpoint, and its initial state, to detect changed settings on resume.

A torch scheduler keeps its settings and its progress in the same dict. On resume the progress must come back, but a
setting that was changed since must not be overwritten silently: both are told apart by the state at the beginning.
"""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch.optim.lr_scheduler import LRScheduler

from lockstep.optim.schedule import set_rate

# Keys of a scheduler's state that hold its progress. All others are settings.
PROGRESS_KEYS = ("last_epoch", "_step_count", "_is_initial", "_get_lr_called_within_step", "_last_lr")


def state_of(scheduler: LRScheduler) -> dict[str, Any]:
    """Return a copy of the state of a scheduler. Schedulers inside it are replaced by their states."""
    # The attribute `step` is the function that refuses direct calls.
    state = {key: value for key, value in scheduler.state_dict().items() if key != "step"}
    return {key: _copied(value) for key, value in state.items()}


def _copied(value: Any) -> Any:
    """Return a copy of all containers, because schedulers change some of them in place."""
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
    current = scheduler.state_dict()
    scheduler.load_state_dict({key: _like(current.get(key), value) for key, value in saved.items()})


def _like(current: Any, saved: Any) -> Any:
    """Return `saved` with the types of `current`: a Counter (of MultiStepLR), or a scheduler, which is loaded."""
    if isinstance(current, LRScheduler):
        load(current, saved)
        return current

    if isinstance(current, Counter):
        return Counter(saved)
    if isinstance(current, dict) and isinstance(saved, dict):
        return {key: _like(current.get(key), value) for key, value in saved.items()}

    # SequentialLR and ChainedScheduler hold a list of states.
    if isinstance(current, list) and isinstance(saved, list) and len(current) == len(saved):
        return [_like(*pair) for pair in zip(current, saved, strict=True)]

    return _copied(saved)


class InitialState:
    """The state of schedulers and parameter groups before the first step, as the user's code made them."""

    def __init__(self, schedulers: list[LRScheduler], groups: list[dict[str, Any]]):
        self.states = [state_of(scheduler) for scheduler in schedulers]

        # The numbers that the functions of a LambdaLR hold, which its state_dict leaves out. The schedulers of
        # transformers are such functions, with the number of steps as an argument.
        self._functions = [list(map(_bound_values, getattr(s, "lr_lambdas", ()))) for s in schedulers]

        # OneCycleLR and CyclicLR also set momenta, and store their bounds in the groups.
        self._options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self._rates = [float(group["lr"]) for group in groups]

    def record(self) -> dict[str, Any]:
        """Return the part that checkpoints save, to compare it when the run is resumed."""
        return {"states": self.states, "functions": self._functions, "rates": self._rates}

    def changes(self, number: int, kind: str, saved: Mapping[str, Any], by_evaluations: bool) -> list[str]:
        """Return the settings of scheduler `number` that differ from the `saved` record, as text."""
        before = {"": saved["states"][number], "function": saved["functions"][number]}
        now = {"": self.states[number], "function": self._functions[number]}
        differences = [*_differences("", before, now)]

        # The state of ReduceLROnPlateau has no initial rates.
        if by_evaluations and saved["rates"] != self._rates:
            differences.append(("lr", saved["rates"], self._rates))

        # Private attributes are derived from public ones, which say more to the user.
        public = [change for change in differences if not any(part.startswith("_") for part in change[0].split("."))]
        return [f"{kind}: {key} {old} -> {new}" for key, old, new in public or differences]

    def starts_at(self, number: int) -> Any:
        return self.states[number].get("last_epoch")

    def restore(self, schedulers: list[LRScheduler], groups: list[dict[str, Any]]) -> None:
        """Restore the initial state of schedulers and groups."""
        for scheduler, state in zip(schedulers, self.states, strict=True):
            load(scheduler, state)

        for group, options, rate in zip(groups, self._options, self._rates, strict=True):
            group.update({key: value for key, value in options.items() if key != "lr"})
            set_rate(group, rate)


def _differences(name: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, old value, new value) of all settings that differ between two nested states."""
    if name.rpartition(".")[2] in PROGRESS_KEYS:
        return

    if isinstance(old, dict) and isinstance(new, dict) and not isinstance(new, Counter):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _differences(f"{name}.{key}" if name else str(key), old.get(key), new.get(key))

    # The schedulers inside a scheduler, or the functions of a LambdaLR.
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and isinstance((new or [0])[0], dict):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from _differences(f"{name}.{index}", *pair)

    elif repr(_plain(old)) != repr(_plain(new)):
        yield name, _plain(old), _plain(new)


def _plain(value: Any) -> Any:
    """Return a value as it looks after a checkpoint: numpy numbers as Python numbers, tuples as lists."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return dict(value) if isinstance(value, Counter) else value


def _bound_values(function: Any) -> dict[str, Any]:
    """Return the plain values that a partial or a closure holds, by name."""
    if isinstance(function, functools.partial):
        values = {**dict(enumerate(function.args)), **function.keywords}
    elif isinstance(function, types.FunctionType):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        values = {name: _content(cell) for name, cell in cells}
    else:
        return {}

    return {str(name): value for name, value in values.items() if isinstance(value, bool | int | float | str)}


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
