"""Weights & Biases. Its own variables choose project, entity and mode: WANDB_PROJECT, WANDB_MODE=offline, ..."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lockstep.observe.sinks.sink import RUN_ID, ServiceSink, run_id, scalars, settings_of


class WandbSink(ServiceSink):
    """Sends the numbers of a run to Weights & Biases; offline they are kept in `wandb/` in the run folder."""

    package = "wandb"
    files = ("wandb", RUN_ID)

    def write(self, record: Mapping[str, Any]) -> None:
        numbers = scalars(record)
        if numbers:
            self._run.log({**numbers, "step": record["step"]})

        # Alerts reach people by mail or chat, as they have set it up there.
        match record.get("event"):
            case "warning":
                self._run.alert(title="warning", text=str(record.get("reason")), level="WARN")
            case "error":
                self._run.alert(title=str(record.get("type")), text=str(record.get("message")), level="ERROR")

    def _open(self) -> Any:
        import wandb

        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "lockstep"),
            name=self._run_dir.resolve().name,
            id=run_id(self._run_dir),
            resume="allow",
            dir=str(self._run_dir),
            config=settings_of(self._run_dir),
            settings=wandb.Settings(silent=True, console="off"),
        )

        # A resumed run repeats some steps. W&B's own step may not go back, so the curves use ours.
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return run
