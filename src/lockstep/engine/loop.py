"""The training loop of `lockstep train` and `lockstep.fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.engine.checks.names import check_attributes
from lockstep.engine.checks.settings import check_evaluations
from lockstep.engine.end import close, end_training
from lockstep.engine.evaluation.evaluator import EvaluationSet, check_data, evaluation_sets
from lockstep.engine.evaluation.metric_names import check_metrics
from lockstep.engine.hooks.calls import Hooks, overridden
from lockstep.engine.hooks.show import call_show
from lockstep.engine.hooks.view import BuiltRunView
from lockstep.engine.run import Run
from lockstep.engine.setup import RunBuilder
from lockstep.parallel.compiled.compiler import compiler_of
from lockstep.parallel.meta.init import init_as_configured
from lockstep.run_folder.names import ASSETS
from lockstep.task import Loss, Task


def fit(task: Task, builder: RunBuilder) -> dict[str, Any]:
    """Train `task` to its end and return the summary.

    set up:                 the model, then the data and the step, from a checkpoint if there is one
    for every global step:  take its batches -> forward, backward, all-reduce, apply -> commit
    when due:               log, evaluate, checkpoint
    at the end:             save the weights, evaluate, show
    """
    training = Training(task, builder)
    for _ in training.steps():
        pass

    return training.end()


class Training:
    """A task and its Run, in the stages of `fit`. A benchmark goes through the steps itself, to stop between two."""

    def __init__(self, task: Task, builder: RunBuilder):
        """Set up the run, and refuse mistakes that can be found before the first step."""
        check_attributes(task)
        self.task = task

        # Make the hooks first: a step computes more if some exist.
        own_callbacks = task.callbacks() if hasattr(task, "callbacks") else ()
        callbacks = [*own_callbacks, *builder.callbacks]
        builder.use_hooks(Hooks(BuiltRunView(builder), task, callbacks))

        # `data` is called once, though automatic pipeline stages need samples before the source is opened.
        data = cache(task.data)
        _setup_model(task, builder, data)
        self.run = builder.setup_run(data(), task.collate)
        self.run.hooks.before_training()

        write_assets = overridden(task, "write_assets")
        if write_assets:
            self.run.runtime.collectives.run_on_rank0(lambda: _write_assets(write_assets, self.run.folder.path))

        # Check the evaluation data before the first step, not when the first evaluation is due.
        self._eval_sets = _eval_sets(task, self.run)
        self.run.check_start(task)
        check_metrics(self.run, task, self._eval_sets)
        self.run.hooks.inject_faults()
        self._loss = self._wrapped_loss()

    def _wrapped_loss(self) -> Callable[[nn.Module, Any], Loss]:
        """Return the loss function of the steps."""
        # The compiler gets the task's own loss. The hooks come after it: they may run any Python.
        compiler = compiler_of(self.run.driver)
        loss = compiler.around(self.task.loss) if compiler else self.task.loss
        return self.run.hooks.around_loss(loss)

    def steps(self) -> Iterator[None]:
        """Train one global step after another. Each evaluates, logs and saves if that is due."""
        run = self.run
        self._evaluate_if_interrupted()

        for batches in run.step_batches():
            result = run.stepper.step(batches, self._loss)
            run.end_step(batches, result)

            # Before the save, so that the checkpoint holds its result.
            if self._eval_sets and run.evaluations.are_due(run.steps_done):
                run.evaluate(self._eval_sets, may_preempt=True)

            run.maintain()
            yield

    def _evaluate_if_interrupted(self) -> None:
        """Repeat the evaluation during which the run was preempted, if there is one."""
        if self.run.requests.take_evaluation_due() and self._eval_sets:
            self.run.evaluate(self._eval_sets, may_preempt=True)
            self.run.save_if_agreed()

    def end(self) -> dict[str, Any]:
        """Save the weights, evaluate, show, and return the summary."""
        run, config = self.run, self.run.config

        # These weights have just been evaluated if an evaluation was due after the last step.
        is_current = run.evaluations.is_current(run.steps_done)
        evaluates = bool(self._eval_sets) and config.evaluate.at_end and not is_current

        # The last evaluation may be the best one, and decides then which weights are written.
        if evaluates and config.checkpoint.best:
            run.evaluate(self._eval_sets, may_preempt=True)

        # This saves the weights. It comes first, so that an error in the evaluation or in `show` cannot lose them.
        end_training(run)
        if evaluates and not config.checkpoint.best:
            run.evaluate(self._eval_sets, may_preempt=True)

        # On all ranks, even if only rank 0 calls `show`: changing the weights may be collective.
        with run.trained_model.optimizers_in_eval():
            text = call_show(self.task, run)

        return close(run, text)


def _setup_model(task: Task, builder: RunBuilder, data: Callable[[], Any]) -> None:
    """Build the task's model, and put it under its driver, with the task's optimizers and state."""
    with init_as_configured(builder.config):
        model = task.model()

    scheduler = overridden(task, "scheduler") or (lambda _: None)
    builder.setup_model(model, task.optimizer, task, data, scheduler)
    if hasattr(task, "state_dict"):
        builder.registered.add("task", task)


def _write_assets(write: Callable[[Path], None], run_dir: Path) -> None:
    """Let the task write its files into RUN/assets, on rank 0."""
    folder = run_dir / ASSETS
    folder.mkdir(exist_ok=True)
    write(folder)


def _eval_sets(task: Task, run: Run) -> list[EvaluationSet]:
    """Return the task's evaluation sets after checking them. There may be none."""
    sets = evaluation_sets(task, run.config.evaluate.monitor)
    for chosen in sets:
        check_data(chosen.dataset, chosen.name)
        run.data_record.add_evaluation(chosen.name, chosen.dataset)

    during_run = run.evaluations.schedule.is_on
    check_evaluations(run.config, bool(sets), during_run, run.learning_rate.needs_evaluations)
    if not sets and during_run:
        run.recorder.event("warning", reason="evaluate.every is set, but the task has no eval_data()")

    return sets
