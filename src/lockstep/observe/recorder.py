"""What a run writes down: metrics, events, progress. Nothing here makes the device wait between log lines."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from lockstep.observe import dyadic, stragglers
from lockstep.observe.metrics import Sums, quotients
from lockstep.observe.plain import fact_lines
from lockstep.observe.progress import Progress, make_progress
from lockstep.observe.sinks import JsonlSink
from lockstep.runtime.context import Runtime


class Recorder:
    """Every rank has one and keeps a log; rank 0's also writes metrics and events, and shows progress."""

    def __init__(self, run_dir: Path, runtime: Runtime, slow_rank: float = 1.3):
        self.runtime, self.run_dir = runtime, run_dir
        self._slow, self._hunger = stragglers.Watch(slow_rank), stragglers.Hunger()
        self.watch_data = False  # whether time for data is time for which the device waits
        self._spent = dict(runtime.heartbeat.spent)
        self._carried_weight = 0.0  # of steps before a resume, in the running interval
        self._log = (run_dir / "logs" / f"rank-{runtime.world.rank}.log").open("a")
        self._views: list[Progress] = []
        self._complained = False
        self._early: list[dict[str, Any]] = []  # events from before there was anything to show them on
        self._metrics = JsonlSink(run_dir / "metrics.jsonl") if runtime.is_main else None
        self._events = JsonlSink(run_dir / "events.jsonl") if runtime.is_main else None
        self.names: list[str] = ["loss"]  # the metrics that all ranks know, in the order of the log
        self._waiting: list[tuple[Callable[[], bool], Callable[[], dict[str, Any]]]] = []
        self._process = psutil.Process()
        self._since = time.perf_counter()
        self.data_wait_s, self.micro_batches = 0.0, 0  # of this rank, in the running interval
        self.last: dict[str, Any] = {}

    def open(self, mode: Any, steps: int, unit: str, start: dict[str, Any]) -> None:
        """Begin to show: on the terminal (rank 0) and in this rank's log."""
        self._views = [make_progress("plain", steps, unit, self._log)]
        if self.runtime.is_main:
            self._views.append(make_progress(mode, steps, unit, sys.stdout))
        for view in self._views:
            if self.runtime.is_main:  # what all ranks have in common is said once
                view.start(start)
                for name, fact in start.get("facts", {}).items():
                    view.message(fact_lines(name, fact))
            for record in self._early:
                view.event(record)
        self._early = []
        self.event("start", **start)

    def start_clock(self) -> None:
        self._since, self.data_wait_s, self.micro_batches = time.perf_counter(), 0.0, 0

    def exclude(self, seconds: float) -> None:
        """Something other than training took this long: the steps of the running interval keep their own time."""
        self._since += seconds

    def interval(self, sums: Sums, steps: int, samples: int, skipped: int, facts: dict[str, Any]) -> None:
        """End an interval of `steps`, of which some were skipped: reduce its sums over ranks, and write them once they
        have arrived."""
        names = list(self.names)
        taken = sums.take(names, self.runtime.device)
        packed = self.runtime.collectives.sum_(torch.cat([taken, self._times(steps)]))
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
        carried, self._carried_weight = self._carried_weight, 0.0

        def record() -> dict[str, Any]:
            values = host.tolist()
            self._look_for_waiting(values[2 * len(names) :], facts["step"])
            return _record(names, values, seconds, facts, carried, skipped)

        self._waiting.append((_arrival(packed), record))
        self.poll()

    def carry(self, sums: Sums) -> dict[str, Any]:
        """The sums of the running interval, all ranks together, for a checkpoint; from now on rank 0 holds them."""
        names = list(self.names)
        totals = sums.everybodys(names, self.runtime.collectives)
        if self.runtime.is_main:
            sums.put(names, totals)
        return {"names": names, "totals": totals}

    def carry_on(self, sums: Sums, carried: dict[str, Any]) -> None:
        """The opposite, on resume."""
        self.names = list(carried["names"])
        if self.runtime.is_main:
            sums.put(carried["names"], carried["totals"])
        self._carried_weight = dyadic.rounded(dyadic.read(carried["totals"][2 * self.names.index("loss") + 1]))

    def _times(self, steps: int) -> torch.Tensor:
        """Every rank's seconds, each in its own place, so that one sum shows them all."""
        world, width = self.runtime.world, stragglers.WIDTH
        slots = torch.zeros(world.size * width, dtype=torch.float64, pin_memory=self.runtime.device.type == "cuda")
        now = dict(self.runtime.heartbeat.spent)
        mine = slice(world.rank * width, (world.rank + 1) * width)
        packed = stragglers.pack(self._spent, now, steps, self.micro_batches)
        slots[mine] = torch.tensor(packed, dtype=torch.float64)
        self._spent = now
        return slots.to(self.runtime.device, non_blocking=True)

    def _look_for_waiting(self, values: list[float], step: int) -> None:
        rows = stragglers.unpack(values)
        if self.watch_data and (hunger := self._hunger.look(rows)):
            self.event("warning", step=step, reason=hunger)
        if found := self._slow.look(rows):
            self.event("slow rank", step=step, rank=found.rank, cause=found.cause, reason=str(found))

    def poll(self, wait: bool = False) -> None:
        """Write what has arrived from the device. Costs nothing when nothing waits."""
        while self._waiting and (wait or self._waiting[0][0]()):
            if wait and self.runtime.device.type == "cuda":
                torch.cuda.synchronize(self.runtime.device)
            self.last = self._waiting.pop(0)[1]()
            with self._whatever_the_disk_says():
                if self._metrics:
                    self._metrics.write(self.last)
            for view in self._views:
                with self._whatever_the_disk_says():
                    view.update(self.last)

    def event(self, event: str, **fields: Any) -> None:
        record = {"time": time.time(), "event": event, **fields}
        with self._whatever_the_disk_says():
            if self._events:
                self._events.write(record)
        if not self._views:
            self._early.append(record)
        for view in self._views:
            with self._whatever_the_disk_says():
                view.event(record)
        if "traceback" in fields:  # the views tell its last line
            with self._whatever_the_disk_says():
                self._log.write(fields["traceback"])

    def hide(self) -> None:
        """Show nothing more on the terminal."""
        for view in self._views[1:]:
            view.close()
        self._views = self._views[:1]

    def close(self) -> None:
        for part in (*self._views, self._metrics, self._events, self._log):
            if part is not None:
                with self._whatever_the_disk_says():
                    part.close()
        self._views, self._metrics, self._events = [], None, None

    @contextmanager
    def _whatever_the_disk_says(self) -> Iterator[None]:
        """A record that cannot be written is lost, and said once; training is worth more."""
        try:
            yield
        except OSError as error:
            if not self._complained:
                self._complained = True
                text = f"warning  some metrics and events cannot be written: {error}. Training goes on"
                print(text, file=sys.stderr, flush=True)

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


def _record(
    names: list[str], packed: list[float], seconds: float, facts: dict[str, Any], carried: float, skipped: int
) -> dict[str, Any]:
    """`carried`: weight from before a resume, for which no time was spent here."""
    means = quotients(names, packed[: 2 * len(names)])
    weight = packed[2 * names.index("loss") + 1]
    # None: no outcome is known yet, since a GPU's come a step late; or all had weight 0. A skipped step is news.
    loss = means.pop("loss", math.nan if skipped else None)
    rate = (weight - carried) / seconds
    return {"loss": loss, **facts, "weight": weight, "weight_per_s": rate, "metrics": means}
