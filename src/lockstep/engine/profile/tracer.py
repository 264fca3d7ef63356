"""Traces a few steps of this rank: torch's profiler for operations, kernels and collectives, and the host's phases.

The phases come from the heartbeat. Two of them are split further: `backward` inside `compute`, and what the framework
does after the optimizer. Outside the traced steps the tracer costs nothing.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from lockstep.engine.profile.flops import wait_for_device
from lockstep.engine.run import Run
from lockstep.observe.profile.timeline import Breakdown, HostPhase, breakdown
from lockstep.parallel.progress import PassProgress
from lockstep.parallel.step_parts import StepPart
from lockstep.task import Loss

# Phases of the heartbeat, and the kind of time that each of them is.
KIND_OF_PHASE = {
    "data": "data wait",
    "compute": "forward",
    "all-reduce": "backward",
    "update": "optimizer",
    "snapshot": "save",
    "commit": "save",
    "evaluate": "evaluate",
    "user code": "user code",
}


class StepTracer(StepPart):
    """Records what happens between `start` and `stop`.

    Two sources are put together: torch's profiler, and marks of this module that say which kind of time begins. The
    marks come from the heartbeat, which every phase of a step beats, and from the backwards of the steps.
    """

    slot = "trace"
    runs_in_pipeline = True  # its trace then lacks the marks of backwards, which overlap with forwards

    def __init__(self, run: Run):
        self.steps = 0  # traced so far
        self.active = False

        self._runtime = run.runtime
        # The profiler does not show the dtype that DDP sends: a hook that compresses gradients halves the bytes.
        self._element_bytes = 2 if run.config.ddp.hook in ("fp16", "bf16") else 4

        self._marks: list[tuple[int, str]] = []  # (when in ns, kind of time that begins)
        self._profile: profile | None = None

    def start(self) -> None:
        """Begin to trace, before a step."""
        activities = [ProfilerActivity.CPU]
        if self._runtime.on_gpu:
            activities.append(ProfilerActivity.CUDA)

        # Shapes give the bytes of collectives.
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()

        heartbeat = self._runtime.heartbeat
        self._hook, heartbeat.hook = heartbeat.hook, self._beat

        # The first step begins with an idle device.
        wait_for_device(self._runtime.device)
        self._marks = []
        self.active = True
        self.steps = 0
        self.mark("framework")

    def before_backward(self, loss: Loss, progress: PassProgress) -> None:
        self.mark("backward")

    def after_backward(self, progress: PassProgress) -> None:
        # The host has waited for the collectives in it. The norms of the gradients, which the last one computes, do not
        # overlap with them.
        self.mark("backward" if progress.is_last_micro_batch else "framework")

    def end_pass(self, progress: PassProgress) -> None:
        self.mark("framework")

    def end_step(self, progress: PassProgress) -> None:
        """Note that a step has been applied: from here on the time is the framework's own."""
        self.steps += 1
        self.mark("framework")

    def mark(self, kind: str) -> None:
        """Note that another kind of time begins now."""
        if self.active:
            self._marks.append((time.time_ns(), kind))

    def stop(self, file: Path) -> Breakdown:
        """End the trace, write it to `file` for Perfetto or Chrome, and return its breakdown."""
        assert self._profile is not None, "stop() before start()"

        # Work that is still on the device belongs to the steps that are traced.
        wait_for_device(self._runtime.device)
        self.mark("end")
        self.active = False
        self._runtime.heartbeat.hook = self._hook

        self._profile.stop()
        self._profile.export_chrome_trace(str(file))
        self._profile = None

        # The phases are one more track of the rank.
        trace = json.loads(file.read_text())
        phases = self._phases(trace.get("baseTimeNanoseconds", 0))
        trace["lockstep_phases"] = [(phase.start, phase.end, phase.kind) for phase in phases]

        file.write_text(json.dumps(trace))
        return breakdown(trace["traceEvents"], phases, self.steps, self._runtime.on_gpu, self._element_bytes)

    def _beat(self, step: int, phase: str) -> None:
        """Let a beat of the heartbeat leave a mark."""
        self.mark(KIND_OF_PHASE.get(phase, "framework"))
        if self._hook is not None:
            self._hook(step, phase)

    def _phases(self, base: int) -> list[HostPhase]:
        """Return the marks as phases, in microseconds of the trace's clock."""
        # The profiler counts from a base of its own.
        times = [((moment - base) / 1e3, kind) for moment, kind in self._marks]
        pairs = itertools.pairwise(times)
        return [HostPhase(start, end, kind) for (start, kind), (end, _) in pairs if end > start]
