"""The training loop of `lockstep train` and `lockstep.fit`."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lockstep.engine.checks.settings import check_before_batch, check_evaluations
from lockstep.engine.evaluation.evaluator import EvaluationSet, check_data, evaluation_sets
from lockstep.engine.hooks.calls import Hooks, overridden
from lockstep.engine.hooks.view import BuiltRunView
from lockstep.engine.run import Run
from lockstep.engine.setup import RunBuilder
from lockstep.parallel.call_chain import run_eagerly
from lockstep.parallel.meta.init import init_as_configured
from lockstep.task import StepBatches, Task


def fit(task: Task, builder: RunBuilder) -> dict[str, Any]:
    """Train `task` to its end and return the summary.

    set up:                 the model, then the data and the step, from a checkpoint if there is one
    for every global step:  take its batches -> forward, backward, all-reduce, apply -> commit
    when due:               log, evaluate, checkpoint
    at the end:             save the weights, evaluate, show
    """
    training = Training(task, builder)
    training.evaluate_if_interrupted()
    for batches in training.run.step_batches():
        training.step(batches)
    return training.end()


class Training:
    """The parts of `fit`. A benchmark calls them itself, to stop between two steps."""

    def __init__(self, task: Task, builder: RunBuilder):
        self.task = task
        callbacks = [*getattr(task, "callbacks", tuple)(), *builder.callbacks]
        builder.use_hooks(Hooks(BuiltRunView(builder), task, callbacks))

        # Called once, though automatic pipeline stages need samples before the source is opened.
        data = cache(task.data)
        scheduler = overridden(task, "scheduler") or (lambda _: None)
        with init_as_configured(builder.config):
            model = task.model()

        setup = builder.setup_model(model, task.optimizer, task, data, scheduler)
        if overridden(task, "before_batch"):
            check_before_batch(builder.config, setup.driver.role, builder.runtime.world.alone)

        if hasattr(task, "state_dict"):
            builder.add_part("task", task)

        self.run = builder.setup_run(data(), task.collate)
        self.run.hooks.before_training()
        self._loss = self.run.hooks.around_loss(task.loss)

        write_assets = overridden(task, "write_assets")
        if write_assets:
            self.run.runtime.collectives.run_on_rank0(lambda: _write_assets(write_assets, self.run.folder.path))

        # Check the evaluation data before the first step, not when the first evaluation is due.
        self._eval_sets = _eval_sets(task, self.run)

        self.run.check_start(task)

    def evaluate_if_interrupted(self) -> None:
        """Repeat the evaluation during which the run was preempted, if there is one."""
        if self._eval_sets and self.run.resumed and self.run.resumed.loop.evaluation_due:
            self._evaluate()
            self.run.save_if_best()

    def step(self, batches: StepBatches) -> None:
        """Train one global step, and do what is due after it."""
        run = self.run
        if run.hooks.follow_batches:
            batches.micro_batches = run.hooks.around_batches(batches.micro_batches)

        result = run.stepper.step(batches, self._loss)
        run.end_step(batches, result)

        if self._eval_sets and run.evaluation_is_due():
            self._evaluate()
        # After the evaluation, so that the checkpoint holds its result.
        run.maintain()

    def end(self) -> dict[str, Any]:
        """Save the weights, evaluate, show, and return the summary."""
        # The last evaluation may be the best one, and must then be a part of the last checkpoint.
        config = self.run.config
        evaluates = bool(self._eval_sets) and config.evaluate.at_end and not self.run.evaluation_is_current
        if evaluates and config.checkpoint.best:
            self._evaluate()

        # This saves the weights. It comes first, so that an error in the evaluation or in `show` cannot lose them.
        self.run.end_training()
        if evaluates and not config.checkpoint.best:
            self._evaluate()

        # On all ranks, even if only rank 0 calls `show`: changing the weights may be collective.
        with self.run.evaluation_weights():
            text = _show(self.task, self.run)

        return self.run.close(text)

    def _evaluate(self) -> None:
        self.run.evaluate(self._eval_sets, may_preempt=True)


def _write_assets(write: Callable[[Path], None], run_dir: Path) -> None:
    folder = run_dir / "assets"
    folder.mkdir(exist_ok=True)
    write(folder)


def _eval_sets(task: Task, run: Run) -> list[EvaluationSet]:
    """Return the task's evaluation sets after checking them. There may be none."""
    sets = evaluation_sets(task, run.config.evaluate.decides)
    for chosen in sets:
        check_data(chosen.data, chosen.name)

    during_run = run.evaluation_schedule.is_on
    check_evaluations(run.config, bool(sets), during_run, run.stepper.learning_rate.needs_evaluations)
    if not sets and during_run:
        run.recorder.event("warning", reason="evaluate.every is set, but the task has no eval_data()")

    return sets


def _show(task: Task, run: Run) -> str | None:
    """Return the text of the task's `show` on rank 0, or None.

    The weights are saved by now, so an error in `show` is logged as a warning and does not fail the run.
    """
    # If a forward is collective, all ranks must run it; otherwise only rank 0 does.
    show = overridden(task, "show")
    role = run.driver.role
    if show is None or not (run.runtime.is_main or role.collective_forwards):
        return None

    if not role.runs_whole_model:
        run.recorder.event("warning", reason="show() is left out: no rank holds the full model (mesh.pp)")
        return None

    run.driver.model.eval()
    run.runtime.heartbeat.beat("user code")  # the watchdog allows more time in this phase
    try:
        # Generated text grows with every token: compiling or capturing every new shape would cost more than it saves.
        with torch.no_grad(), run_eagerly(run.driver.model), run.driver.many_forwards() as warning:
            if warning:
                run.recorder.event("warning", reason=f"show(): {warning}")
            text = show(run.driver.model)
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
    code = getattr(inspect.unwrap(task.show), "__code__", None)
    own_frames = [frame for frame in (*frames, *earlier) if code and frame.filename == code.co_filename]
    frame = (own_frames or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
