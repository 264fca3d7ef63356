"""The hooks of a run: first the task's, then each callback's, in the order of the list.

Hooks are found once, at the start. A run without hooks makes no calls for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lockstep import faults
from lockstep.checkpoint.state.stateful import RegisteredState
from lockstep.engine.hooks.callback_order import CallbackOrder
from lockstep.errors import UserError
from lockstep.task import Loss, MicroBatch, RunView, StepResult, Task

# Every hook, with the arguments of the call. `Task` documents each of them.
USER_HOOKS = {
    "before_training": ("run",),
    "first_steps": ("names",),
    "before_batch": ("run", "micro"),
    "before_backward": ("run", "loss"),
    "after_step": ("run", "result"),
    "after_eval": ("run", "metrics"),
}


class Hook(NamedTuple):
    """A method of a task or a callback that the run calls."""

    name: str  # `MyTask.after_step`
    call: Callable[..., Any]
    owner: Any  # the task or the callback


class Hooks:
    """Calls the hooks of a task and of callbacks."""

    def __init__(self, view: RunView, task: Any = None, callbacks: Sequence[Any] = ()):
        self._view = view
        self.callbacks = list(callbacks)
        _check_callbacks(self.callbacks)

        # The task's hooks come first.
        owners = [owner for owner in (task, *self.callbacks) if owner is not None]
        self._found: dict[str, list[Hook]] = {}
        for name in USER_HOOKS:
            found = [find(owner, name) for owner in owners]
            self._found[name] = [hook for hook in found if hook is not None]

    def named(self, name: str) -> list[Hook]:
        """Return the hooks of this name, in the order in which they are called."""
        return self._found[name]

    def has(self, name: str) -> bool:
        """Return whether there is a hook of this name."""
        return bool(self._found[name])

    def register(self, state: RegisteredState) -> None:
        """Save the callbacks that have state, which a resumed run must have too.

        The name is the callback's own `name`, or that of its class; several of one class are numbered.
        """
        sharing: dict[str, list[Any]] = {}
        # A callback without a state is not saved, and needs no name.
        for callback in self.callbacks:
            if hasattr(callback, "state_dict"):
                name = _own_name(callback) or type(callback).__name__
                sharing.setdefault(name, []).append(callback)

        # The first has no number, so that a single one keeps its name when a second is added.
        for name, callbacks in sharing.items():
            _check_shared_name(name, callbacks)
            for number, callback in enumerate(callbacks, start=1):
                suffix = f" {number}" if number > 1 else ""
                state.add(f"callback {name}{suffix}", callback, required=True)

        # Numbers follow the order of the list, so the order must be the same after a resume.
        numbered = {name: callbacks for name, callbacks in sharing.items() if len(callbacks) > 1}
        if numbered:
            state.add("order of callbacks", CallbackOrder(numbered))

    def before_training(self) -> None:
        self._call_all("before_training")

    def around_batches(self, micro_batches: Iterable[MicroBatch]) -> Iterable[MicroBatch]:
        """Return the micro-batches, each of which comes after the calls of `before_batch`."""
        return map(self._before_batch, micro_batches)

    def _before_batch(self, micro: MicroBatch) -> MicroBatch:
        self._call_all("before_batch", micro)
        return micro

    def around_loss(self, loss_fn: Callable[..., Loss]) -> Callable[..., Loss]:
        """Return a loss function that ends with the calls of `before_backward`, or `loss_fn` if there are none."""
        if not self.has("before_backward"):
            return loss_fn

        return lambda model, batch: self.before_backward(loss_fn(model, batch))

    def before_backward(self, loss: Loss) -> Loss:
        """Return the loss as the hooks leave it: each may replace it, for the next one too."""
        for hook in self._found["before_backward"]:
            changed = self._call(hook, loss, in_step=True)
            if changed is not None and not isinstance(changed, Loss):
                raise UserError(
                    f"{hook.name} must return a lockstep.Loss, or None; it returned a {type(changed).__name__}",
                    "",
                    "return lockstep.Loss(total, loss.weight, loss.metrics)",
                )

            loss = loss if changed is None else changed

        return loss

    def inject_faults(self) -> None:
        """Carry out a test's faults of the point "loss" from now on, after all other hooks `before_backward`.

        Call it after the start check, which calls the loss too.
        """
        if faults.planned():
            self._found["before_backward"].append(Hook("injected fault", _fault_in_loss, None))

    def after_step(self, result: StepResult | None) -> None:
        self._call_all("after_step", result)

    def after_eval(self, metrics: Mapping[str, float]) -> None:
        self._call_all("after_eval", metrics)

    def _call_all(self, name: str, *arguments: Any) -> None:
        """Call the hooks of this name with the run and `arguments`."""
        in_step = name == "before_batch"
        for hook in self._found[name]:
            self._call(hook, *arguments, in_step=in_step)

    def _call(self, hook: Hook, *arguments: Any, in_step: bool) -> Any:
        """Call a hook with the run and `arguments`. An error gets a note: which hook, rank and step.

        `in_step`: the hook is called in a step, which does not count as done yet.
        """
        try:
            return hook.call(self._view, *arguments)
        except Exception as error:
            # StopIteration would silently end the iterator that calls the hook.
            ends = isinstance(error, StopIteration)
            raised = RuntimeError(f"{hook.name}() raised StopIteration") if ends else error
            step = self._view.steps_done + in_step
            raised.add_note(f"raised in {hook.name}() on rank {self._view.rank}, at step {step}")
            if ends:
                raise raised from error

            raise


def _fault_in_loss(run: RunView, loss: Loss) -> Loss | None:
    """Carry out the faults that are due: they may end this process, or make the loss inf or nan."""
    how = faults.fire("loss", run.steps_done)
    return replace(loss, total=loss.total * float(how)) if how else None


def overridden(owner: Any, name: str) -> Callable[..., Any] | None:
    """Return the method of this name, or None if a task does not override the default of Task, which does nothing."""
    # A task need not subclass Task, and its methods may be plain functions.
    method = getattr(owner, name, None)
    return None if getattr(method, "__func__", method) is getattr(Task, name) else method


def find(owner: Any, name: str) -> Hook | None:
    """Return a hook of a task or a callback after checking its arguments; None if it has no such hook."""
    method = overridden(owner, name)
    if method is None:
        return None

    full_name = f"{type(owner).__name__}.{name}"
    _check_function(full_name, method)
    _check_arguments(full_name, method, name)
    return Hook(full_name, method, owner)


def _check_function(full_name: str, method: Any) -> None:
    """Raise if calling a hook would not run its body."""
    if not callable(method):
        raise UserError(f"{full_name} is a {type(method).__name__}, and a hook is a function", "", "rename it")

    if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
        is_async = inspect.iscoroutinefunction(method)
        kind, word = ("an async function", "async") if is_async else ("a generator", "yield")
        raise UserError(f"{full_name} is {kind}, whose body a call does not run", "", f"write it without {word}")


def _check_arguments(full_name: str, method: Callable[..., Any], name: str) -> None:
    """Raise if a hook cannot be called with the arguments of USER_HOOKS."""
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # not every callable has one
        return

    expected = USER_HOOKS[name]
    try:
        signature.bind(*expected)
    except TypeError as error:
        raise UserError(
            f"{full_name} cannot be called with the arguments of this hook, {', '.join(expected)}",
            f"it is defined as {full_name}({', '.join(signature.parameters)})",
            f"define it as def {name}(self, {', '.join(expected)})",
        ) from error


def _own_name(callback: Any) -> str | None:
    """Return the `name` of a callback, or None if it has none, or one that is not a string."""
    name = getattr(callback, "name", None)
    return name if isinstance(name, str) else None


def _check_shared_name(name: str, callbacks: Sequence[Any]) -> None:
    """Raise if several callbacks have one name. Callbacks of one class without a name of their own may share it."""
    kinds = {type(callback) for callback in callbacks}
    if len(callbacks) > 1 and (len(kinds) > 1 or any(map(_own_name, callbacks))):
        raise UserError(
            f"{len(callbacks)} callbacks with state are called {name!r}",
            f"of {', '.join(sorted(f'{kind.__module__}.{kind.__qualname__}' for kind in kinds))}",
            "give each its own name: self.name = '...'",
        )


def _check_callbacks(callbacks: Sequence[Any]) -> None:
    """Refuse classes in place of objects, and objects without any hook."""
    for callback in callbacks:
        if isinstance(callback, type):
            raise UserError(
                f"the callback {callback.__name__} is a class; a callback is an object",
                "",
                f"pass {callback.__name__}(...)",
            )

        if not any(hasattr(callback, name) for name in USER_HOOKS):
            raise UserError(
                f"a {type(callback).__name__} is not a callback: it has none of the hooks",
                "",
                f"give it one of these methods: {', '.join(USER_HOOKS)}",
            )
