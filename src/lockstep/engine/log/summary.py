"""The summary of a run, which it returns and writes to `summary.json`."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.engine.run import Run

COMPARE = {">=": operator.ge, "<=": operator.le}


def summary_of(run: Run, best: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return counts, losses, and the goals with their verdicts. `best` describes the best checkpoint, if any."""
    stepper, evaluations = run.stepper, run.evaluations

    # The loss of the last log line, and the newest evaluation, even if steps came after it.
    newest = evaluations.newest
    metrics = newest.metrics if newest else {}
    losses = {
        "loss": run.recorder.last.get("loss"),
        "eval_loss": newest.loss if newest else None,
    }

    summary = {
        "task": run.name,
        "step": stepper.steps_done,
        "applied": stepper.steps_applied,
        "skipped": stepper.steps_skipped,
        "seconds": run.seconds,
        **losses,
        "eval_metrics": metrics,
        "world": run.runtime.world.size,
    }

    # Keys that not every summary has.
    if evaluations.by_set:
        summary["evaluations"] = {name: other.named() for name, other in evaluations.by_set.items()}

    if best:
        summary["best"] = best

    # The weights of the last step are saved anyway.
    if run.checkpoints.pending.failure is not None:
        summary["save_failed"] = run.checkpoints.pending.failure

    if run.requests.stop_reason:
        summary["stopped"] = run.requests.stop_reason

    if run.trained_model.initial:
        summary["init_from"] = run.trained_model.initial.state_dict()

    # The losses come last, so that a metric named "loss" cannot replace them.
    goals = judge(run.config.goals, evaluations.results() | metrics | losses)
    if goals:
        summary["goals"] = goals
        summary["pass"] = all(goal["pass"] for goal in goals)

    return summary


def judge(goals: Sequence[str], values: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """Return each goal (`accuracy >= 0.9`) with its value and whether it passes. A missing value or NaN fails."""
    verdicts = []
    for goal in goals:
        name, sign, bound = goal.split()
        value = values.get(name)
        reached = value is not None and not math.isnan(value) and COMPARE[sign](value, float(bound))

        verdicts.append({"target": goal, "value": value, "pass": reached})

    return verdicts
