"""The recorder of a run: metrics, events, progress.

The sums of an interval are reduced over ranks on the device and copied to the host without waiting. A line is written
once its numbers have arrived, so that logging never makes the host wait for the device.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from lockstep.observe import stragglers
from lockstep.observe.console import Display, fact_lines, open_display
from lockstep.observe.metrics import EndedInterval, Interval, Sums, exact_from_text, from_exact, quotients
from lockstep.observe.sinks import RunJsonl, SinkList
from lockstep.run_folder.names import LOGS
from lockstep.runtime.context import Runtime


@dataclass(frozen=True)
class PendingLine:
    """A line of metrics whose numbers are still on their way from the device."""

    arrived: Callable[[], bool]
    make: Callable[[], dict[str, Any]]  # returns the line, once they have arrived


class Recorder:
    """Keeps the log of a rank. On rank 0 it also writes metrics and events and shows progress.

    The sums of an interval are reduced over the ranks when it ends, and arrive on the host later, while training goes
    on. Events are written at once.
    """

    def __init__(self, run_dir: Path, runtime: Runtime, slow_rank: float = 1.3, sinks: Sequence[str] = ()):
        """Open the files of this rank.

        `slow_rank` is `checks.slow_rank`: a rank is reported if it takes that many times as long as the others.
        `sinks` names sinks besides the JSON lines, which rank 0 always writes.
        """
        self.runtime = runtime
        self.last: dict[str, Any] = {}  # the last line of metrics

        self._slow_ranks = stragglers.SlowRankWatch(slow_rank)
        self._late_data = stragglers.LateDataWatch()
        self.reports_late_data = False  # whether the device waits while a rank waits for data
        self._spent = dict(runtime.heartbeat.spent)

        # Only rank 0 writes records.
        self._log = (run_dir / LOGS / f"rank-{runtime.world.rank}.log").open("a")
        self._jsonl = RunJsonl(run_dir) if runtime.is_main else None
        self._sinks = SinkList(sinks, run_dir if runtime.is_main else None, self._warn)

        self._warned_of_disk = False
        self._displays: list[Display] = []
        self._early: list[dict[str, Any]] = []  # events from before there was a display

        self._lines: list[PendingLine] = []  # oldest first

        self._process = psutil.Process()

    def open(self, mode: Any, steps: int, unit: str, start: dict[str, Any]) -> None:
        """Begin to show progress: on the terminal (rank 0) and in this rank's log.

        `mode` is `log.progress`; `start` is the start event, whose `facts` are the lines of the banner.
        """
        self._displays = [open_display("plain", steps, unit, self._log)]
        if self.runtime.is_main:
            self._displays.append(open_display(mode, steps, unit, sys.stdout))

        for display in self._displays:
            # Facts that all ranks have in common are shown once.
            if self.runtime.is_main:
                display.start(start)
                for name, fact in start.get("facts", {}).items():
                    display.message(fact_lines(name, fact))

            for record in self._early:
                display.event(record)

        self._early = []
        self.event("start", **start)

    # ---- metrics ----

    def end_interval(
        self, interval: Interval, late_steps: float, names: Sequence[str], numbers: dict[str, Any]
    ) -> None:
        """End an interval: reduce its sums over ranks, and write its line once they have arrived. Collective.

        late_steps: the number of its last steps whose losses are not in its sums yet
        names: the metrics of the line, the same on all ranks
        numbers: the numbers that are equal on all ranks: step, learning rate, norm, epoch, loss scale
        """
        # One all-reduce carries both the sums and the times of all ranks.
        names = list(names)
        sums = self.runtime.collectives.all_reduce_(
            torch.cat([interval.sums.take(names, self.runtime.device), self._times(interval)])
        )

        ended = interval.end(late_steps)
        known = self._known_numbers(ended, numbers)

        # The other ranks were needed for the all-reduce, but have no line to write.
        if self._jsonl is not None:
            self._queue_line(names, sums, ended, known)
            self.poll()

    def _known_numbers(self, ended: EndedInterval, numbers: dict[str, Any]) -> dict[str, Any]:
        """Return the numbers of a line that the host knows when the interval ends. Time and memory are this rank's."""
        return {
            "time": time.time(),
            **numbers,
            "memory_mb": self._memory_bytes() / 2**20,
            "step_s": ended.step_s,
            "data_wait_s": ended.data_wait_s / ended.steps,
            "samples": ended.samples,
            "samples_per_s": ended.samples / ended.seconds,
        }

    def _queue_line(self, names: list[str], sums: torch.Tensor, ended: EndedInterval, known: dict[str, Any]) -> None:
        """Copy the reduced sums to the host, where `poll` makes the line of them."""
        # Training continues during the copy, and the next interval may end before this line is written.
        host = sums.to("cpu", non_blocking=True)

        def make_line() -> dict[str, Any]:
            values = host.tolist()
            self._report_waiting(values[2 * len(names) :], known["step"])
            return _metrics_line(names, values, ended, known)

        self._lines.append(PendingLine(_arrival(self.runtime.on_gpu), make_line))

    def _memory_bytes(self) -> int:
        if self.runtime.on_gpu:
            return torch.cuda.max_memory_allocated(self.runtime.device)

        return self._process.memory_info().rss

    def poll(self, wait: bool = False) -> None:
        """Write the lines whose numbers have arrived from the device, or, with `wait`, all lines."""
        while self._lines and (wait or self._lines[0].arrived()):
            # Host-device synchronisation: at the end of a run and before a save, which waits for the device anyway.
            if wait and self.runtime.on_gpu:
                torch.cuda.synchronize(self.runtime.device)

            # Lines are written in the order of their steps.
            self.last = self._lines.pop(0).make()
            self._write(self.last)

            for display in self._displays:
                display.update(self.last)

    def write_late_metrics(self, sums: Sums, steps_done: int) -> None:
        """Write the metrics that were logged after the last line, as the event `metrics`. Collective."""
        logged = {name for names in self.runtime.collectives.all_gather_json(sums.names()) for name in names}
        names = sorted(logged - {"loss"})
        if not names:
            return

        totals = [from_exact(exact_from_text(total)) for total in sums.take_global(names, self.runtime.collectives)]
        if metrics := quotients(names, totals):
            self.event("metrics", step=steps_done, metrics=metrics)

    def _times(self, interval: Interval) -> torch.Tensor:
        """Return shape (ranks * WIDTH,): this rank's figures in its slot, and 0 elsewhere, to be summed over ranks."""
        slots = torch.zeros(
            (self.runtime.world.size, stragglers.WIDTH),
            dtype=torch.float64,
            pin_memory=self.runtime.on_gpu,
        )

        # The heartbeat counts the seconds of every phase since the start.
        spent = dict(self.runtime.heartbeat.spent)

        figures = stragglers.pack(self._spent, spent, interval.steps, interval.micro_batches)
        slots[self.runtime.world.rank] = torch.tensor(figures, dtype=torch.float64)
        self._spent = spent
        return slots.flatten().to(self.runtime.device, non_blocking=True)

    def _report_waiting(self, values: list[float], steps_done: int) -> None:
        """Write a warning if a rank waits for data, or if one is slower than the others."""
        rows = stragglers.unpack(values)
        if self.reports_late_data and (late := self._late_data.look(rows)):
            self.event("warning", step=steps_done, reason=late)

        if slow := self._slow_ranks.look(rows):
            self.event("slow rank", step=steps_done, rank=slow.rank, cause=slow.work, reason=str(slow))

    # ---- events ----

    def event(self, event: str, **fields: Any) -> None:
        """Record an event: in `events.jsonl` (rank 0) and in every rank's own log. `fields` are plain values."""
        record = {"time": time.time(), "event": event, **fields}
        self._write(record)

        # There is no display before `open`, which shows these events later.
        if not self._displays:
            self._early.append(record)

        for display in self._displays:
            display.event(record)

        # Displays show only the last line of a traceback.
        if "traceback" in fields:
            with self._ignoring_disk_errors():
                self._log.write(fields["traceback"])

    def hide(self) -> None:
        """Close the terminal display: the process that started this one shows the error."""
        for display in self._displays[1:]:
            display.close()

        self._displays = self._displays[:1]

    def close(self) -> None:
        """Close all outputs. A full disk does not prevent the other outputs from being closed."""
        for output in (*self._displays, self._jsonl, self._sinks, self._log):
            if output is not None:
                with self._ignoring_disk_errors():
                    output.close()

        # A run that fails while it closes may still record an event, which must not be written to a closed file.
        self._displays = []
        self._jsonl = None

    def _write(self, record: dict[str, Any]) -> None:
        """Write a record to the run folder, and to the sinks. Only rank 0 has them."""
        with self._ignoring_disk_errors():
            if self._jsonl:
                self._jsonl.write(record)

        self._sinks.write(record)

    @contextmanager
    def _ignoring_disk_errors(self) -> Iterator[None]:
        """Drop a record that cannot be written and warn once: a full disk must not stop training."""
        try:
            yield
        except OSError as error:
            if not self._warned_of_disk:
                self._warned_of_disk = True
                self._warn(f"some metrics and events cannot be written: {error}. Training continues")

    def _warn(self, text: str) -> None:
        # Not an event, because events may be what cannot be written.
        print(f"warning  {text}", file=sys.stderr, flush=True)


def _arrival(on_gpu: bool) -> Callable[[], bool]:
    """Return a function that says, without waiting, whether all work queued so far is done, copies included."""
    if not on_gpu:
        return lambda: True

    event = torch.cuda.Event()
    event.record()
    return event.query


def _metrics_line(names: list[str], sums: list[float], ended: EndedInterval, known: dict[str, Any]) -> dict[str, Any]:
    """Return a line of metrics, with the numbers that were `known` when the interval ended.

    `sums` holds (sum, weight) of every name, followed by the figures of the ranks.
    """
    means = quotients(names, sums[: 2 * len(names)])
    weight = sums[2 * names.index("loss") + 1]

    # With no weight, the loss is NaN if steps were skipped, so that the skip is visible. Otherwise it is None: all
    # steps had weight 0, or none is known yet (a GPU's results come a step late).
    loss = means.pop("loss", math.nan if ended.has_skips else None)

    # The sums may have one step more or less than the interval, so the weight is divided by the time of their steps.
    seconds = ended.steps_in_sums * ended.step_s
    rate = (weight - ended.weight_before_resume) / seconds if seconds else None
    return {"loss": loss, **known, "weight": weight, "weight_per_s": rate, "metrics": means}
