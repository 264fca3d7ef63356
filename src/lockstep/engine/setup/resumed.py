"""The plan and the last line of the log, which `RunBuilder.setup_run` continues if the run resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.checkpoint.loading.resume import Resumed
from lockstep.config import RunConfig
from lockstep.engine.checks.settings import check_epochs_countable
from lockstep.engine.step import Stepper
from lockstep.observe.sinks import read_jsonl
from lockstep.plan.plan import Plan
from lockstep.run_folder.names import METRICS
from lockstep.task import BatchSource


def continue_plan(resumed: Resumed, plan: Plan, source: BatchSource, stepper: Stepper, config: RunConfig) -> Plan:
    """Return the plan of a resumed run: its epochs are counted by the data, as its steps may have another size."""
    if source.step_order is None:
        check_epochs_countable(config, resumed.global_batch, plan.global_batch)
        return plan

    plan = plan.resumed(config, stepper.steps_done, source.step_order.steps_counted)

    # The schedule ends with the plan, whose number of steps may just have changed.
    stepper.change_total_steps(plan.steps)
    return plan


def last_log_line(run_dir: Path, steps_done: int) -> dict[str, Any]:
    """Return the last record of metrics.jsonl that was written when at most so many steps were done, or {}."""
    path = run_dir / METRICS
    lines = read_jsonl(path) if path.exists() else []
    return next((line for line in reversed(lines) if line["step"] <= steps_done), {})
