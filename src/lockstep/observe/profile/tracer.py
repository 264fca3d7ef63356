"""Traces a few steps of this rank: torch's profiler for operations, kernels and collectives, and the host's phases.

The phases come from the heartbeat. Two of them are split further: `backward` inside `compute`, and what the framework
does after the optimizer. Outside the traced steps the tracer costs nothing.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lockstep.observe.profile.timeline import Breakdown, Span, breakdown
from lockstep.runtime.context import Runtime

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


class StepTracer:
    """Records what happens between `start` and `stop`.

    Two sources are put together: torch's profiler, and marks of this module that say which kind of time begins. The
    marks come from the heartbeat, which every phase of a step beats, and from the driver's backward.
    """

    def __init__(self, runtime: Runtime, driver: Any, element_bytes: int = 4):
        self.steps = 0  # traced so far
        self.active = False

        self._runtime = runtime
        self._driver = driver
        self._element_bytes = element_bytes  # of what DDP sends: 2 with a hook that compresses to 16 bits

        self._marks: list[tuple[int, str]] = []  # (when in ns, kind of time that begins)
        self._profile: profile | None = None

    @property
    def on_gpu(self) -> bool:
        return self._runtime.device.type == "cuda"

    def start(self) -> None:
        """Begin to trace, before a step."""
        activities = [ProfilerActivity.CPU]
        if self.on_gpu:
            activities.append(ProfilerActivity.CUDA)

        # Shapes give the bytes of collectives.
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()
        self._watch()

        # The first step begins with an idle device.
        self._wait()
        self.active = True
        self.steps = 0
        self.mark("framework")

    def end_step(self) -> None:
        """Note that a step has been applied: what follows is the framework's own time."""
        self.steps += 1
        self.mark("framework")

    def mark(self, kind: str) -> None:
        """Note that another kind of time begins now."""
        self._marks.append((time.time_ns(), kind))

    def stop(self, file: Path) -> Breakdown:
        """End the trace, write it to `file` for Perfetto or Chrome, and return its breakdown."""
        assert self._profile is not None, "stop() before start()"

        # Work that is still on the device belongs to the steps that are traced.
        self._wait()
        self.mark("end")
        self.active = False
        self._unwatch()

        self._profile.stop()
        self._profile.export_chrome_trace(str(file))
        self._profile = None

        # The phases are one more track of the rank.
        trace = json.loads(file.read_text())
        spans = self._spans(trace.get("baseTimeNanoseconds", 0))
        trace["lockstep_spans"] = [(span.start, span.end, span.kind) for span in spans]

        file.write_text(json.dumps(trace))
        return breakdown(trace["traceEvents"], spans, self.steps, self.on_gpu, self._element_bytes)

    def _wait(self) -> None:
        """Wait for the device. Host-device synchronisation, at both ends of a trace."""
        if self.on_gpu:
            torch.cuda.synchronize(self._runtime.device)

    def _watch(self) -> None:
        """Let every beat of the heartbeat, and the begin and the end of every backward, leave a mark."""
        heartbeat, driver = self._runtime.heartbeat, self._driver
        self._marks = []
        self._hook, self._backward, self._autograd = heartbeat.hook, driver.backward, driver._backward

        def beat(step: int, phase: str) -> None:
            self.mark(KIND_OF_PHASE.get(phase, "framework"))
            if self._hook is not None:
                self._hook(step, phase)

        def backward(*arguments: Any, **named: Any) -> Any:
            # The phase begins with the call, and what follows belongs to the framework until the next mark.
            self.mark("backward")
            result = self._backward(*arguments, **named)
            self.mark("framework")
            return result

        def autograd(*arguments: Any) -> None:
            # The host has waited for the collectives in it. The norms of the gradients do not overlap with them.
            self._autograd(*arguments)
            self.mark("backward")

        heartbeat.hook = beat
        driver.backward = backward
        driver._backward = autograd

    def _unwatch(self) -> None:
        """Take the marks away again."""
        self._runtime.heartbeat.hook = self._hook
        del self._driver.backward, self._driver._backward  # the methods of the class are back

    def _spans(self, base: int) -> list[Span]:
        """Return the marks as spans, in microseconds of the trace's clock."""
        # The profiler counts from a base of its own.
        times = [((moment - base) / 1e3, kind) for moment, kind in self._marks]
        pairs = itertools.pairwise(times)
        return [Span(start, end, kind) for (start, kind), (end, _) in pairs if end > start]
