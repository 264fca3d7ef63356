"""`lockstep train --profile`: traces a few steps of a run and says where their time goes.

The trace begins after `profile.after` steps, when everything is warm, and lasts for `profile.count` steps. The files in
RUN/profile: trace.json.gz is one timeline of all ranks, breakdown.json has the numbers, and the report shows them.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from lockstep.engine.profile.flops import StepFlops, matmul_rate
from lockstep.engine.run import Run
from lockstep.observe.profile.merge import mean_kinds, merge, warnings
from lockstep.observe.profile.tracer import StepTracer
from lockstep.runtime.seeds import preserve_rng


class ProfiledSteps:
    """Decides when a run is traced. `begin_step` and `end_step` are called around every step."""

    def __init__(self, run: Run):
        config = run.config.profile
        self._run = run

        # A resumed run counts from where it resumes, because that is when it warms up.
        self._first = run.stepper.counters.steps_done + config.after
        self._steps = config.count  # None: nothing is traced, or no longer
        self._flops = StepFlops(run.driver)

        # Said now, not after hours of training.
        if self._steps and self._first >= run.plan.steps:
            reason = f"no step is profiled: the run ends at step {run.plan.steps}, and profile.after={config.after}"
            run.recorder.event("warning", reason=reason)

    def begin_step(self) -> None:
        """Begin the trace if it is due."""
        run = self._run
        if self._steps and run.tracer is None and run.stepper.counters.steps_done == self._first:
            self._flops.watch()
            start_tracer(run)

    def end_step(self) -> None:
        """End the trace if it is complete, and write everything. Collective in that step."""
        # A run that ends during the trace writes what it has.
        run = self._run
        last = run.stepper.counters.steps_done >= run.plan.steps or run.requests.is_stopping
        if run.tracer is None or not (run.tracer.steps == self._steps or last):
            return

        # What is done here is no part of the step: its time is left out of the metrics.
        began = time.perf_counter()
        folder = run.folder.path / "profile"
        folder.mkdir(exist_ok=True)

        ranks = run.runtime.collectives.gather_json(self._stop(folder))
        if run.runtime.is_main:
            self._write(folder, ranks)

        self._report(ranks)
        run.recorder.exclude(time.perf_counter() - began)

    def _stop(self, folder: Path) -> dict[str, Any]:
        """End this rank's trace, write it, and return its breakdown with the operations of a step."""
        run = self._run
        mine = stop_tracer(run, folder / f"rank-{run.runtime.world.rank}.json")
        self._steps = None

        # After the trace, of which the counted forward is no part.
        self._flops.unwatch()
        with preserve_rng(run.runtime.device):
            mine["flops"] = self._flops.of_step(len(run.stepper.progress.trained))

        # MFU: the share of the device's peak that the steps have used.
        mine["peak_flops"] = matmul_rate(run.runtime.device)
        if mine["flops"]:
            seconds = mine["seconds"] / max(1, mine["steps"])
            mine["mfu"] = mine["flops"] / seconds / mine["peak_flops"]

        return mine

    def _write(self, folder: Path, ranks: list[dict[str, Any]]) -> None:
        """Write one timeline and the numbers of all ranks."""
        # Ranks of other machines leave their traces on disks of their own.
        files = [folder / f"rank-{number}.json" for number in range(len(ranks))]
        merge([file for file in files if file.exists()], folder / "trace.json.gz")

        record = {"steps": ranks[0]["steps"], "step": self._run.stepper.counters.steps_done, "ranks": ranks}
        (folder / "breakdown.json").write_text(json.dumps(record, indent=1))

    def _report(self, ranks: list[dict[str, Any]]) -> None:
        """Record what the steps went into, and what to do about it."""
        run = self._run
        # Means over the ranks, in milliseconds.
        kinds = {kind: round(1e3 * seconds, 3) for kind, seconds in mean_kinds(ranks).items() if seconds > 0}
        facts: dict[str, Any] = {"ms_per_step": kinds, "overlap_fraction": round(_mean(ranks, "overlap_fraction"), 3)}

        # Operations are not counted for every model, and only a GPU says how busy it was.
        if all(rank.get("mfu") for rank in ranks):
            facts["mfu"] = round(_mean(ranks, "mfu"), 4)
        if ranks[0]["busy"] is not None:
            facts["gpu_busy"] = round(_mean(ranks, "busy"), 3)

        # The event has the numbers; what to do about them comes as warnings.
        run.recorder.event("profile", step=run.stepper.counters.steps_done, trace="profile/trace.json.gz", **facts)
        for reason in warnings(ranks):
            run.recorder.event("warning", step=run.stepper.counters.steps_done, reason=reason)


def start_tracer(run: Run) -> None:
    """Trace the run's steps from now on."""
    # Bytes of a gradient's element on the wire, for the bandwidth.
    sent_in_half = run.config.ddp.hook in ("fp16", "bf16")
    run.tracer = StepTracer(run.runtime, run.driver, element_bytes=2 if sent_in_half else 4)
    run.tracer.start()


def stop_tracer(run: Run, file: Path) -> dict[str, Any]:
    """End the trace, write it to a file, and return its breakdown."""
    assert run.tracer is not None
    found = run.tracer.stop(file)
    run.tracer = None
    return found.as_dict()


def _mean(ranks: list[dict[str, Any]], key: str) -> float:
    return sum(rank[key] for rank in ranks) / len(ranks)
