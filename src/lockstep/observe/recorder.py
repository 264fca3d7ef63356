"""What a run writes down: metrics, events, progress. Nothing here makes the device wait between log lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from lockstep.observe.metrics import Sums, quotients
from lockstep.observe.progress import Progress, make_progress
from lockstep.observe.sinks import JsonlSink
from lockstep.runtime.context import Runtime


class Recorder:
    """Every rank has one and keeps a log; rank 0's also writes metrics and events, and shows progress."""

    def __init__(self, run_dir: Path, runtime: Runtime):
        self.runtime, self.run_dir = runtime, run_dir
        self._log = (run_dir / "logs" / f"rank-{runtime.world.rank}.log").open("a")
        self._views: list[Progress] = []
        self._metrics = JsonlSink(run_dir / "metrics.jsonl") if runtime.is_main else None
        self._events = JsonlSink(run_dir / "events.jsonl") if runtime.is_main else None
        self.names: list[str] = ["loss"]  # the metrics that all ranks know, in the order of the log
        self._waiting: list[tuple[Callable[[], bool], Callable[[], dict[str, Any]]]] = []
        self._process = psutil.Process()
        self._since = time.perf_counter()
        self.data_wait_s = 0.0
        self.last: dict[str, Any] = {}

    def open(self, mode: Any, steps: int, unit: str, start: dict[str, Any]) -> None:
        """Begin to show: on the terminal (rank 0) and in this rank's log."""
        self._views = [make_progress("plain", steps, unit, self._log)]
        if self.runtime.is_main:
            self._views.append(make_progress(mode, steps, unit, sys.stdout))
        for view in self._views:
            view.start(start)
            for name, fact in start.get("facts", {}).items():
                view.message(f"  {name:14} {fact}")
        self.event("start", **start)

    def start_clock(self) -> None:
        self._since, self.data_wait_s = time.perf_counter(), 0.0

    def exclude(self, seconds: float) -> None:
        """Something other than training took this long: the steps of the running interval keep their own time."""
        self._since += seconds

    def interval(self, sums: Sums, steps: int, samples: int, facts: dict[str, Any]) -> None:
        """End an interval of `steps`: reduce its sums over ranks, and write them once they have arrived."""
        names = list(self.names)
        packed = self.runtime.collectives.sum_(sums.take(names, self.runtime.device))
        seconds = time.perf_counter() - self._since
        facts = {"time": time.time(), **facts, "memory_mb": self._memory_mb(), "step_s": seconds / steps}
        facts |= {
            "data_wait_s": self.data_wait_s / steps,
            "samples": samples,
            "samples_per_s": samples / seconds,
        }
        self.start_clock()
        if self._metrics is None:
            return
        host = packed.to("cpu", non_blocking=True)
        self._waiting.append((_arrival(packed), lambda: _record(names, host.tolist(), seconds, facts)))
        self.poll()

    def poll(self, wait: bool = False) -> None:
        """Write what has arrived from the device. Costs nothing when nothing waits."""
        while self._waiting and (wait or self._waiting[0][0]()):
            if wait and self.runtime.device.type == "cuda":
                torch.cuda.synchronize(self.runtime.device)
            self.last = self._waiting.pop(0)[1]()
            if self._metrics:
                self._metrics.write(self.last)
            for view in self._views:
                view.update(self.last)

    def event(self, event: str, **fields: Any) -> None:
        record = {"time": time.time(), "event": event, **fields}
        if self._events:
            self._events.write(record)
        for view in self._views:
            view.event(record)

    def close(self) -> None:
        for part in (*self._views, self._metrics, self._events, self._log):
            if part is not None:
                part.close()
        self._views, self._metrics, self._events = [], None, None

    def agree_on_names(self, mine: set[str]) -> None:
        """Some rank has seen a metric for the first time: from now on all of them know it."""
        everybody = self.runtime.collectives.gather_json(sorted(mine))
        self.names = ["loss", *sorted({name for names in everybody for name in names} - {"loss"})]

    def _memory_mb(self) -> float:
        if self.runtime.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.runtime.device) / 2**20
        return self._process.memory_info().rss / 2**20


def _arrival(tensor: torch.Tensor) -> Callable[[], bool]:
    if tensor.device.type != "cuda":
        return lambda: True
    event = torch.cuda.Event()
    event.record()
    return event.query


def _record(names: list[str], packed: list[float], seconds: float, facts: dict[str, Any]) -> dict[str, Any]:
    means = quotients(names, packed)
    weight = packed[2 * names.index("loss") + 1]
    loss = means.pop("loss")
    return {"loss": loss, **facts, "weight": weight, "weight_per_s": weight / seconds, "metrics": means}
