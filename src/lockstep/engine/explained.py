"""Errors of torch's in the words of a run: what was asked, what was found, what to type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.engine import exhausted
from lockstep.errors import UserError

if TYPE_CHECKING:
    from lockstep.engine.run import Run


@contextmanager
def explained(run: Run) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if exhausted.is_one(error):
            raise exhausted.explanation(error, run) from error
        if "mixed torch.Tensor and DTensor" in str(error) and hasattr(run, "driver") and not run.driver.replicated:
            raise _outside_the_model(error, run) from error
        raise


def _outside_the_model(error: RuntimeError, run: Run) -> UserError:
    """Only in a forward are parameters whole that this rank holds parts of."""
    asked = f"strategy={run.config.strategy}" + (f" mesh.tp={run.config.mesh.tp}" if run.config.mesh.tp else "")
    return UserError(
        f"{asked}, with a task that computes with parameters, or calls a part of the model, by itself",
        f"parameters of which this rank holds a part: {str(error).splitlines()[0]}",
        "do that inside the model's forward, which the task calls; let the optimizer's weight_decay be the penalty of "
        "weights; or type strategy=ddp, where parameters are whole",
    )
