"""The training loop of `lockstep train` and `lockstep.fit`."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch

from lockstep.engine.checks import check_best, check_places
from lockstep.engine.evaluate import check_data
from lockstep.engine.run import Run
from lockstep.parallel.meta_init import make_model
from lockstep.task import MicroBatch, Task


def fit(task: Task, run: Run) -> dict[str, Any]:
    """
    for every global step:  take -> forward, backward, exchange, apply -> commit
    now and then:           log, evaluate, keep a checkpoint
    at the end:             save, evaluate, show
    """
    data = cache(task.data)  # made once, whoever needs it first
    run.adopt(make_model(task.model, run.config), task.optimizer, task, data)
    if hasattr(task, "state_dict"):
        run.others["task"] = task
    before_batch = task.before_batch if _overrides(task, "before_batch") else None
    if before_batch is not None:
        check_places(run.config, not run.driver.placement.runs_whole_model, run.runtime.world.alone)
    run.open(data(), task.collate)
    held_out = task.eval_data()
    if held_out is not None:
        check_data(held_out)
    check_best(run.config, held_out is not None)
    after_step = task.after_step if _overrides(task, "after_step") else None
    every = run.config.evaluate.every if held_out is not None else None
    if run.config.evaluate.every and held_out is None:
        run.recorder.event("warning", reason="evaluate.every is set, but the task has no eval_data()")

    if every and run.resumed and run.resumed.evaluation_due:
        run.evaluate(held_out, task.eval_loss, task.collate, may_leave=True)

    for share in run.shares():
        if before_batch is not None:
            share.batches = _told(share.batches, before_batch)
        result = run.stepper.step(share, task.loss)
        run.finish(share, result)
        if after_step is not None:
            run.runtime.heartbeat.beat("yours", run.stepper.counters.step)
            after_step(run.driver.model, run.stepper.counters.step)
            run.runtime.heartbeat.beat("data")
        if every and run.stepper.counters.step % every == 0:
            run.evaluate(held_out, task.eval_loss, task.collate, may_leave=True)
        run.keep()

    run.save()
    if held_out is not None and run.config.evaluate.at_end and not run.evaluated:
        run.evaluate(held_out, task.eval_loss, task.collate, may_leave=True)
    return run.close(_show(task, run))


def _overrides(task: Any, method: str) -> bool:
    """Whether it has one of its own: nobody calls a method that does nothing in every step."""
    own = getattr(task, method, None)
    return own is not None and getattr(own, "__func__", own) is not getattr(Task, method)


def _told(batches: Iterable[MicroBatch], before_batch: Callable[[MicroBatch], None]) -> Iterator[MicroBatch]:
    for micro in batches:
        before_batch(micro)
        yield micro


def _show(task: Task, run: Run) -> str | None:
    """The weights are saved: an error in a sample's code is told, and does not spoil the run."""
    if not _overrides(task, "show") or (not run.runtime.is_main and not run.driver.placement.collective_forwards):
        return None
    if not run.driver.placement.runs_whole_model:
        run.recorder.event("warning", reason="show() is left out: no rank holds the whole model (mesh.pp)")
        return None
    run.driver.model.eval()
    run.runtime.heartbeat.beat("yours")  # it may take its time
    try:
        # Growing inputs would compile again and again.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), run.driver.many_forwards() as known:
            if known:
                run.recorder.event("warning", reason=f"show(): {known}")
            text = task.show(run.driver.model)  # by all ranks, where a forward waits for the others
            return text if run.runtime.is_main else None
    except Exception as error:
        reason = f"show() failed: {type(error).__name__}: {error} ({_place(error, task)})"
        run.recorder.event("warning", reason=reason, traceback=traceback.format_exc())
        return None


def _place(error: BaseException, task: Task) -> str:
    """Where in the task's own file, also if that error has led to another one; or else where at all."""
    frames = traceback.extract_tb(error.__traceback__)
    cause = traceback.extract_tb(error.__context__.__traceback__) if error.__context__ else []
    code = getattr(inspect.unwrap(task.show), "__code__", None)
    own = [frame for frame in (*frames, *cause) if code and frame.filename == code.co_filename]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
