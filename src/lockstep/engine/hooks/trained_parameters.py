"""The parameters that a step updates, if the hook `first_steps` delays some of them (`Unfreeze`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.engine.hooks.calls import Hook
from lockstep.errors import UserError, some_names
from lockstep.parallel.driver import Driver, Reduced
from lockstep.parallel.micro_batches import runs_whole_model


class TrainedParameters:
    """The parameters that are trained at each step: a function of the step, the same on all ranks."""

    def __init__(self, driver: Driver, hooks: Sequence[Hook]):
        """Ask the `hooks` for the first step of each parameter; of several, the latest counts.

        A parameter that a hook leaves out is trained from the first step on.
        """
        if not runs_whole_model(driver):
            raise UserError(
                f"{type(hooks[0].owner).__name__} cannot be used in a pipeline (mesh.pp)",
                "each stage knows its own gradients only",
                "set strategy=fsdp or strategy=ddp, or leave the callback out",
            )

        asked = [_ask(hook, [*driver.parameters]) for hook in hooks]

        # By identity: the step knows parameters and not their names.
        self._first_steps = {id(p): max(steps.get(name, 0) for steps in asked) for name, p in driver.parameters.items()}

        # From this step on nothing is dropped, and the step pays for one comparison.
        self._all_from = max(self._first_steps.values())

    def drop_untrained(self, reduced: Reduced, step: int) -> Reduced:
        """Drop the gradients of parameters that `step` does not train yet."""
        if step >= self._all_from:
            return reduced

        return reduced.drop_others({key for key, first in self._first_steps.items() if first <= step})


def _ask(hook: Hook, names: Sequence[str]) -> Mapping[str, int]:
    """Return the result of a hook `first_steps` after checking it."""
    steps = hook.call(names)
    if not isinstance(steps, Mapping):
        raise UserError(
            f"{hook.name} must return a dictionary; it returned a {type(steps).__name__}",
            "",
            "return {name of a parameter: the first step that trains it}",
        )

    for name, step in steps.items():
        if name not in names:
            raise UserError(
                f"{hook.name} names {name!r}, which is no trainable parameter",
                f"they are called {some_names(list(names))}",
                "take the names from its argument: def first_steps(self, names)",
            )

        if not isinstance(step, int) or step < 0:
            raise UserError(
                f"{hook.name} returned {step!r} for {name!r}, which is no step",
                "",
                "return a whole number: the index of the first step that trains it",
            )

    return steps
