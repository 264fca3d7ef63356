"""The log of the steps: a line of metrics every few steps and, with `log.samples`, the samples of each step.

No line makes the host wait for the device. Losses and metrics are summed there, and the recorder writes a line when its
sums have arrived, which may be some steps later.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from lockstep.engine.step import Stepper
from lockstep.observe.metrics import Interval
from lockstep.observe.recorder import Recorder
from lockstep.observe.sinks import JsonlSink
from lockstep.parallel.progress import PassProgress
from lockstep.parallel.step_parts import StepPart
from lockstep.plan.plan import Plan
from lockstep.run_folder.names import SAMPLES
from lockstep.run_folder.opened import RunFolder
from lockstep.runtime.collectives import Collectives
from lockstep.task import Number, StepResult, Weight


class SampleLog(StepPart):
    """Writes which samples this rank trained in each step: `log.samples`."""

    slot = "log"
    runs_in_pipeline = True

    def __init__(self, folder: RunFolder, rank: int):
        path = folder.path / SAMPLES / f"rank-{rank}.jsonl"
        path.parent.mkdir(exist_ok=True)
        self._attempt = folder.attempt
        self._sink = JsonlSink(path)

    def end_step(self, progress: PassProgress) -> None:
        """Write the line of a step. A step that is repeated has one line per attempt, of which the last counts."""
        # The epoch comes first: an id alone does not name a sample whose dataset changes between epochs.
        ids = [[batch.epoch, *map(int, batch.ids)] for batch in progress.micro_batches]
        step = progress.step + 1
        self._sink.write({"step": step, "attempt": self._attempt, "time": time.time(), "epoch_and_ids": ids})

    def close(self) -> None:
        self._sink.close()


class StepLog:
    """Writes log lines. The next one covers the interval, to which the Stepper adds losses.

    A line is due after every `log.every` steps and after the last one. It is written later, when the user's code has
    logged what belongs to the step.
    """

    def __init__(
        self,
        every: int,
        plan: Plan,
        stepper: Stepper,
        interval: Interval,
        recorder: Recorder,
        collectives: Collectives,
    ):
        self.interval = interval  # since the last line
        self._every = every
        self._plan = plan
        self._stepper = stepper
        self._recorder = recorder
        self._collectives = collectives

        self._newest: StepResult | None = None  # the newest known result
        self.line_due = False  # the line of this step is not written yet

    def add_metric(self, name: str, total: Number, weight: Weight) -> None:
        """Add to a metric of the next line."""
        self.interval.add_metric(name, total, weight)

    def end_step(self, samples: int, result: StepResult | None, is_last: bool, waits_s: Sequence[float] = ()) -> None:
        """Count a step. `result` is the newest known result, which is the step's own if it is the last step.

        `samples` are those of all ranks; `waits_s` has the wait of this rank for each of its micro-batches.
        """
        self.interval.add_step(samples, waits_s)
        self._newest = result

        # Otherwise the previous line may be ready: nothing waits for its sums to come from the device.
        if is_last or self._stepper.steps_done % self._every == 0:
            self.line_due = True
        else:
            self._recorder.poll()

    def write_if_due(self) -> None:
        """Write the line of this step, unless it is written or not due. Collective if it is due."""
        if self.line_due:
            self._write(self._newest)

    def write_rest(self, last: StepResult | None) -> None:
        """Write the line of steps that have none yet: those before a `break` in a custom loop. Collective."""
        if self.interval.steps:
            self._write(last or self._newest)

    def _write(self, result: StepResult | None) -> None:
        """Write the line of the interval, and begin the next one. Collective."""
        self.line_due = False
        stepper = self._stepper
        steps_done = stepper.steps_done
        numbers: dict[str, Any] = {
            "step": steps_done,
            "lr": float(stepper.lr),
            "skipped": stepper.steps_skipped,
        }

        # Numbers that not every run has.
        if result is not None:
            numbers["grad_norm"] = result.grad_norm

        epoch = self._plan.epochs_after(steps_done)
        if epoch is not None:
            numbers["epoch"] = epoch

        if stepper.scaler:
            numbers["scale"] = stepper.scaler.value

        # `new` comes from the control word, so all ranks enter this collective together. It is set for the first line
        # of a process: a hook may have logged its first values after the control word of this step.
        names = self.interval.metric_names
        if names.new:
            names.agree(self._collectives)

        # The sums stay on the device. The recorder reduces them over the ranks and reads them later, without waiting.
        self._recorder.end_interval(self.interval, stepper.late_steps, names.known, numbers)

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the interval. Collective."""
        names = self.interval.metric_names
        if self._collectives.any(bool(names.unshared)):
            names.agree(self._collectives)

        return {"interval": self.interval.state_dict(names.known, self._collectives)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to the interval in a checkpoint, which has the outcomes of all its steps."""
        self.interval.restart()
        saved = state.get("interval")
        if saved is not None:
            self.interval.metric_names.restore(saved["names"])
            self.interval.load_state_dict(saved, self._collectives)
