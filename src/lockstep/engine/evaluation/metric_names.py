"""Metrics that settings name: a misspelt one is found before the first step, not at the first evaluation.

Only an evaluation shows which metrics a task has. One batch of it is enough if the name is there. If it is not, the
batch may lack it by chance, and the whole set is evaluated: most likely the run ends with an error then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lockstep.engine.evaluation.early_stop import check_metric
from lockstep.engine.evaluation.evaluator import EvaluationSet, evaluation_batch
from lockstep.parallel.calls.chain import run_eagerly
from lockstep.parallel.micro_batches import runs_whole_model
from lockstep.runtime.seeds import preserve_rng
from lockstep.start_check.snapshot import CheckSnapshot

if TYPE_CHECKING:
    from lockstep.engine.run import Run


def check_metrics(run: Run, task: Any, sets: Sequence[EvaluationSet]) -> None:
    """Raise if stop.metric or checkpoint.best is not a result of the task's evaluation. Collective."""
    # The losses are always there.
    losses = _names((chosen, ()) for chosen in sets)
    wanted = {"checkpoint.best": run.config.checkpoint.best}

    if run.config.stop.patience is not None:
        wanted["stop.metric"] = run.config.stop.metric

    wanted = {key: metric for key, metric in wanted.items() if metric and metric not in losses}

    # The ranks of a pipeline see different parts of an evaluation.
    if not wanted or not sets or not runs_whole_model(run.driver):
        return

    # Every rank has the same names in both cases, so all of them take the same branch.
    with _without_a_trace(run, task):
        names = _names_of_first_batches(run, sets)
        if names is not None and not set(wanted.values()) <= names.keys():
            names = _names_of_all(run, sets)

    for key, metric in wanted.items():
        if names is not None and metric is not None:
            check_metric(key, metric, names)


@contextmanager
def _without_a_trace(run: Run, task: Any) -> Iterator[None]:
    """Return a context after which generators, the model and the task are as before."""
    model = run.driver.model
    snapshot = CheckSnapshot(model, task, (), copies_parameters=False)

    with preserve_rng(run.runtime.device), run_eagerly(model), run.source.reading_here(), run.gathering.whole_batches():
        try:
            yield
        finally:
            snapshot.restore()


def _names_of_first_batches(run: Run, sets: Sequence[EvaluationSet]) -> dict[str, None] | None:
    """Return the names of the results of one batch of each set; None if it fails. The first evaluation reports that."""
    evaluator = run.trained_model.evaluator
    batch = evaluation_batch(run.config, run.plan.global_batch)
    driver = run.driver
    assert runs_whole_model(driver), "check_metrics leaves pipelines out"

    try:
        with driver.many_forwards():
            found = [evaluator.first_names(chosen, batch) for chosen in sets]
    except Exception:
        found = None

    # A rank that failed must not leave the others in the evaluation that may follow.
    everyone = run.runtime.collectives.all_gather_json(found)
    if found is None or None in everyone:
        return None

    return _names(zip(sets, found, strict=True))


def _names_of_all(run: Run, sets: Sequence[EvaluationSet]) -> dict[str, None]:
    """Return the names of the results of whole evaluations. Collective."""
    evaluator = run.trained_model.evaluator
    batch = evaluation_batch(run.config, run.plan.global_batch)

    evaluations = [evaluator.measure(chosen, batch, steps_done=0) for chosen in sets]
    found = [evaluation.metrics if evaluation else () for evaluation in evaluations]
    return _names(zip(sets, found, strict=True))


def _names(found: Iterable[tuple[EvaluationSet, Iterable[str]]]) -> dict[str, None]:
    """Return the names of results as settings use them (see `Evaluations.results`), in their order."""
    names = ["eval_loss"]
    for chosen, metrics in found:
        if chosen.monitored:
            names += metrics

        if chosen.name:
            names += [f"{chosen.name}/{name}" for name in ("loss", *metrics)]

    return dict.fromkeys(names)
