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
from lockstep.engine.profile.tracer import StepTracer
from lockstep.engine.run import Run
from lockstep.observe.profile.merge import mean_kinds, mean_over_ranks, merge, warnings
from lockstep.parallel.driver import LossFn
from lockstep.parallel.step_parts import StepPart
from lockstep.run_folder.names import PROFILE
from lockstep.runtime.seeds import preserve_rng


def add_profile(run: Run, loss_fn: LossFn | None) -> None:
    """Let `run` be traced, as the settings say. `loss_fn` is the task's loss; None in a custom loop."""
    tracer, flops = StepTracer(run), StepFlops(run.driver, loss_fn)
    for part in (tracer, flops, ProfiledSteps(run, tracer, flops)):
        run.driver.parts.add(part)


class ProfiledSteps(StepPart):
    """Decides when a run is traced."""

    slot = "trace"
    runs_in_pipeline = True

    def __init__(self, run: Run, tracer: StepTracer, flops: StepFlops):
        # Counted from here, not from step 0: a resumed run has to warm up again.
        config = run.config.profile
        self._run = run
        self._first = run.steps_done + config.after
        self._steps = config.count  # None if no trace is asked for, and after the only one
        self._tracer = tracer
        self._flops = flops

        if self._steps and self._first >= run.plan.steps:
            reason = f"no step is profiled: the run ends at step {run.plan.steps}, and profile.after={config.after}"
            run.recorder.event("warning", reason=reason)

    def begin_step(self, steps_left: int) -> None:
        """Begin the trace if it is due."""
        if self._steps and not self._tracer.active and self._run.steps_done == self._first:
            self._flops.start()
            self._tracer.start()

    def after_maintenance(self) -> None:
        """End the trace if it is complete, and write everything. Collective in that step."""
        # A run that ends early, after a signal for example, keeps the steps that were traced until then.
        run, tracer = self._run, self._tracer
        last = run.steps_done >= run.plan.steps or run.requests.is_stopping
        if not tracer.active or not (tracer.steps == self._steps or last):
            return

        # The following work is no part of the step: its time is left out of the metrics.
        began = time.perf_counter()
        folder = run.folder.path / PROFILE
        folder.mkdir(exist_ok=True)

        # Each rank has traced itself; rank 0 puts the timelines together.
        ranks = run.runtime.collectives.all_gather_json(self._stop(folder))
        if run.runtime.is_main:
            self._write(folder, ranks)

        self._report(ranks)
        run.log.interval.exclude(time.perf_counter() - began)

    def _stop(self, folder: Path) -> dict[str, Any]:
        """End this rank's trace, write it, and return its breakdown with the operations of a step."""
        run = self._run
        mine = self._tracer.stop(folder / f"rank-{run.runtime.world.rank}.json").as_dict()
        self._steps = None  # one trace in a run

        # After the trace, of which the counted forward is no part. It may draw random numbers, for dropout, and the
        # steps after a profile must be the same as without one.
        with preserve_rng(run.runtime.device):
            mine["flops"] = self._flops.of_step(len(run.progress.micro_batches))

        # The rate is measured on this device, now: a data sheet knows neither its power limit nor a CPU's cores.
        mine["peak_flops"] = matmul_rate(run.runtime.device)
        # The model FLOPs utilisation: operations per second, as a share of what the device can do.
        if mine["flops"]:
            seconds = mine["seconds"] / max(1, mine["steps"])
            mine["mfu"] = mine["flops"] / seconds / mine["peak_flops"]

        return mine

    def _write(self, folder: Path, ranks: list[dict[str, Any]]) -> None:
        """Write one timeline and the numbers of all ranks."""
        # Ranks of other machines leave their traces on disks of their own.
        files = [folder / f"rank-{number}.json" for number in range(len(ranks))]
        merge([file for file in files if file.exists()], folder / "trace.json.gz")

        record = {"steps": ranks[0]["steps"], "step": self._run.steps_done, "ranks": ranks}
        (folder / "breakdown.json").write_text(json.dumps(record, indent=1))

    def _report(self, ranks: list[dict[str, Any]]) -> None:
        """Record where the time of the steps went, with advice."""
        # Means over the ranks, in milliseconds. What takes no time, such as communication on one rank, is left out.
        kinds = {kind: round(1e3 * seconds, 3) for kind, seconds in mean_kinds(ranks).items() if seconds > 0}
        facts: dict[str, Any] = {
            "ms_per_step": kinds,
            "overlap_fraction": round(mean_over_ranks(ranks, "overlap_fraction"), 3),
        }

        # Numbers that not every run has: the operations may be unknown, and a CPU has no kernels to be busy with.
        if all(rank.get("mfu") for rank in ranks):
            facts["mfu"] = round(mean_over_ranks(ranks, "mfu"), 4)

        if ranks[0]["busy"] is not None:
            facts["gpu_busy"] = round(mean_over_ranks(ranks, "busy"), 3)

        step = self._run.steps_done
        self._run.recorder.event("profile", step=step, trace="profile/trace.json.gz", **facts)
        for reason in warnings(ranks):
            self._run.recorder.event("warning", step=step, reason=reason)
