"""Gradual unfreezing: parameters that are trained from a given step on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from lockstep.errors import UserError


class Unfreeze:
    """Trains parameters from a given step on: `Unfreeze({"encoder.*": 1000, "embed.*": 2000})`.

    Keys are patterns of parameter names, as in a shell; the first that matches counts. Parameters that match none are
    trained from the start. Before its step a parameter has a gradient, which is dropped: the optimizer does not see the
    parameter, makes no state for it, and does not decay it; clipping does not count it. All of this is a function of
    the step and needs no state.
    """

    def __init__(self, first_step: Mapping[str, int]):
        self.first_step = dict(first_step)
        for pattern, step in self.first_step.items():
            if not isinstance(step, int) or step < 0:
                raise UserError(
                    f"Unfreeze: {pattern!r} is trained from step {step!r} on, which is no step",
                    "",
                    f"give a whole number: Unfreeze({{{pattern!r}: 1000}})",
                )

    def first_steps(self, names: Sequence[str]) -> dict[str, int]:
        """Return, for each of these parameters, the first step that trains it."""
        for pattern in self.first_step:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UserError(
                    f"Unfreeze: no trainable parameter matches {pattern!r}",
                    f"they are called {', '.join(names[:3])}, ...",
                    "correct the pattern; parameters must not be frozen in model(): requires_grad=True",
                )

        # The first pattern that matches a name counts.
        patterns = self.first_step.items()
        steps = {name: next((step for p, step in patterns if fnmatchcase(name, p)), 0) for name in names}
        if min(steps.values()) > 0:
            raise UserError(
                f"Unfreeze: no parameter is trained before step {min(steps.values())}",
                "every parameter matches a pattern with a later step",
                "give the layers that are trained first the step 0",
            )

        return steps
