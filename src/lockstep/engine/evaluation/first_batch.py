"""A batch of each evaluation set, before the first step: a loss that fails in eval mode must not cost a whole training.

The model of a detection task, for example, returns its losses in training, and boxes in eval mode.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from lockstep.engine.evaluation.evaluator import EvaluationSet, evaluation_batch
from lockstep.engine.hooks.calls import overridden
from lockstep.errors import UserError, message_of
from lockstep.launch.ranks import rank_record
from lockstep.parallel.calls.chain import run_eagerly
from lockstep.parallel.micro_batches import runs_whole_model
from lockstep.runtime.seeds import preserve_rng
from lockstep.start_check.snapshot import CheckSnapshot

if TYPE_CHECKING:
    from lockstep.engine.run import Run

FEW = 4  # samples, which are read and evaluated at once


def try_evaluations(run: Run, task: Any, sets: Sequence[EvaluationSet]) -> None:
    """Raise on all ranks if the first samples of a set cannot be evaluated. Nothing changes. Collective."""
    config = run.config
    evaluates = run.evaluations.schedule.is_on or config.evaluate.at_end

    # A stage of a pipeline has no loss of its own.
    if not (sets and evaluates) or config.checks.loss == "off" or not runs_whole_model(run.driver):
        return

    run.runtime.heartbeat.beat("build")
    with without_a_trace(run, task, sets):
        for chosen in sets:
            _try(run, task, chosen)


@contextmanager
def without_a_trace(run: Run, task: Any, sets: Sequence[EvaluationSet]) -> Iterator[None]:
    """Return a context for evaluations after which generators, the model, the task and the datasets are as before."""
    model = run.driver.model
    snapshots = [CheckSnapshot(model, task, (), copies_parameters=False)]

    # Of a dataset only its own attributes count, such as a generator.
    snapshots += [CheckSnapshot(nn.Module(), chosen.dataset, (), copies_parameters=False) for chosen in sets]

    with preserve_rng(run.runtime.device), run_eagerly(model), run.source.reading_here(), run.gathering.whole_batches():
        try:
            yield
        finally:
            for snapshot in snapshots:
                snapshot.restore()


def _try(run: Run, task: Any, chosen: EvaluationSet) -> None:
    """Evaluate the first samples of a set on every rank; raise on all of them if that fails."""
    first_batch = chosen.batch or evaluation_batch(run.config, run.plan.global_batch)
    driver = run.driver
    assert runs_whole_model(driver), "try_evaluations leaves pipelines out"

    # A few samples take no time. A loss may need more of them, so that only a whole batch shows a mistake.
    failed, args = None, None
    for samples in dict.fromkeys([min(FEW, first_batch), first_batch]):
        failed = None
        try:
            with driver.many_forwards():
                run.trained_model.evaluator.first_batch(chosen, samples)
        except UserError as error:
            failed = error
        except Exception as error:
            failed = _failed(error, task, chosen)
            failed.__cause__ = error

        everyone = run.runtime.collectives.all_gather_json(list(failed.args) if failed else None)
        args = next(filter(None, everyone), None)
        if args is None:
            return

    raise failed or UserError(*(args or ()))


def _failed(error: Exception, task: Any, chosen: EvaluationSet) -> UserError:
    """Return the error for the user, with the line of the task that has failed."""
    line = rank_record.raising_line(error)
    file, _, number = line.rpartition(":")
    source = linecache.getline(file, int(number)).strip() if number.isdigit() else ""

    # A loss that is only for evaluations has a mistake of its own.
    own = chosen.loss_fn != getattr(task, "eval_loss", None) or overridden(task, "eval_loss")
    advice = "correct it"
    if not own:
        advice = (
            "define eval_loss(self, model, batch) in the task if its model returns something else in eval mode, as "
            "models for detection do"
        )

    name = f" of {chosen.name!r}" if chosen.name else ""
    return UserError(
        f"the evaluation{name} would fail: {type(error).__name__}: {message_of(error)}".splitlines()[0],
        f"at {line}{': ' * bool(source)}{source} (tried before the first step, in eval mode)",
        f"{advice}; evaluate.at_end=false without evaluate.every evaluates nothing; checks.loss=off does not try it",
    )
