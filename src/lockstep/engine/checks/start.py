"""The check at the start, for a Run.

`start_check` calls the loss of a task before the first step. That of a custom loop cannot be called: its first forward
and its first loss are checked instead: the state of the model must stay as it was, and the loss must not be a mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.causes import in_own_loop
from lockstep.engine.checks.mean_loss import find_mean
from lockstep.engine.hooks.calls import overridden
from lockstep.start_check.check import accepted_causes, error_for
from lockstep.start_check.checked_run import CheckedRun
from lockstep.start_check.mistakes import judge_changes
from lockstep.start_check.probe import has_statistics
from lockstep.start_check.snapshot import CheckSnapshot

if TYPE_CHECKING:
    from lockstep.engine.run import Run


def as_checked(run: Run, task: Any) -> CheckedRun:
    """Return what the check at the start uses of a run. `task` is None in a custom loop."""
    return CheckedRun(
        config=run.config,
        runtime=run.runtime,
        driver=run.driver,
        precision=run.precision,
        source=run.source,
        micro_batch_size=run.plan.micro_batch,
        optimizers=run.trained_model.optimizers.all,
        log_event=run.recorder.event,
        prepares_batches=bool(overridden(task, "before_batch")),
        around_loss=run.hooks.around_loss,
        whole_batches=run.gathering.whole_batches,
    )


def snapshot_for_own_loop(run: Run) -> CheckSnapshot | None:
    """Return a snapshot of the state before the first forward of a custom loop, or None if nothing is checked."""
    if run.config.checks.loss == "off" or run.steps_done > 0:
        return None

    return CheckSnapshot(run.driver.model, None, (), copies_parameters=False)


def check_own_loop(run: Run, snapshot: CheckSnapshot, loss_sum: Any, weight: Any) -> None:
    """Raise if the first forward of a custom loop changed state that it must not change, or if its loss is a mean.

    Call it before the first backward, with the arguments of `step.backward`.
    """
    changes = snapshot.changes()

    # Running statistics of a BatchNorm are meant to change, and Lockstep knows how to combine them.
    statistics = [name for name, module in run.driver.model.named_modules() if has_statistics(module)]
    changes.model = [name for name in changes.model if name.rpartition(".")[0] not in statistics]

    changes.averages = []

    for cause in (judge_changes(changes, set()), find_mean(loss_sum, weight)):
        if cause and cause.key not in accepted_causes(run.config):
            raise error_for(in_own_loop(cause), run.config)
