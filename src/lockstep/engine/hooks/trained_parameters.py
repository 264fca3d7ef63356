"""Which parameters a step updates, if a callback delays some of them (`Unfreeze`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.errors import UserError
from lockstep.parallel.driver import Driver, Reduced


class TrainedParameters:
    """The parameters that are trained at each step: a function of the step, the same on all ranks."""

    def __init__(self, driver: Driver, callbacks: Sequence[Any]):
        """Ask the `callbacks` for the first step of each parameter; of several, the latest counts."""
        if not driver.role.runs_whole_model:
            raise UserError(
                f"{type(callbacks[0]).__name__} cannot be used in a pipeline (mesh.pp)",
                "each stage knows its own gradients only",
                "set strategy=fsdp or strategy=ddp, or leave the callback out",
            )

        asked = [callback.first_steps(driver.names) for callback in callbacks]
        self._first_steps = {
            id(p): max(steps[name] for steps in asked) for name, p in zip(driver.names, driver.parameters, strict=True)
        }
        self._all_from = max(self._first_steps.values())

    def drop_others(self, reduced: Reduced, step: int) -> Reduced:
        """Drop the gradients of parameters that `step` does not train yet."""
        if step >= self._all_from:
            return reduced
        return reduced.drop_others({key for key, first in self._first_steps.items() if first <= step})
