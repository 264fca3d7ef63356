"""The call of a task's `show` at the end of a run."""

from __future__ import annotations

import inspect
import traceback
from typing import TYPE_CHECKING

import torch

from lockstep.engine.hooks.calls import overridden
from lockstep.parallel.calls.chain import run_eagerly
from lockstep.parallel.micro_batches import runs_whole_model
from lockstep.task import Task

if TYPE_CHECKING:
    from lockstep.engine.run import Run


def call_show(task: Task, run: Run) -> str | None:
    """Return the text of the task's `show` on rank 0, or None.

    The weights are saved already, so an error in `show` is logged as a warning and does not fail the run.
    """
    # If the model is sharded, all ranks must run its forwards; otherwise only rank 0 does.
    show = overridden(task, "show")
    driver = run.driver
    if show is None or (driver.role.replicated and not run.runtime.is_main):
        return None

    if not runs_whole_model(driver):
        run.recorder.event("warning", reason="show() is left out: no rank holds the full model (mesh.pp)")
        return None

    driver.model.eval()

    run.runtime.heartbeat.beat("user code")  # the watchdog allows more time in this phase
    try:
        # Generated text grows with every token: compiling or capturing every new shape would cost more than it saves.
        with torch.no_grad(), run_eagerly(driver.model), driver.many_forwards() as warning:
            if warning:
                run.recorder.event("warning", reason=f"show(): {warning}")

            text = show(driver.model)
    except Exception as error:
        reason = f"show() failed: {type(error).__name__}: {error} ({_location(error, task)})"
        run.recorder.event("warning", reason=reason, traceback=traceback.format_exc())
        return None

    return text if run.runtime.is_main else None


def _location(error: BaseException, task: Task) -> str:
    """Return the innermost line of the task's own file in the traceback, or else the line that raised `error`."""
    frames = traceback.extract_tb(error.__traceback__)

    # `error` may have been raised while another error, from the task's own code, was handled.
    earlier = traceback.extract_tb(error.__context__.__traceback__) if error.__context__ else []

    # The file of the task, which may be wrapped by a decorator.
    code = getattr(inspect.unwrap(task.show), "__code__", None)
    own_frames = [frame for frame in (*frames, *earlier) if code and frame.filename == code.co_filename]
    frame = (own_frames or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
