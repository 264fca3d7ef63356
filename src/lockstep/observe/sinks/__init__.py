"""Sinks: where the records of a run go.

A sink gets every record of rank 0: metrics, and events, which have the key `event`. `metrics.jsonl` and
`events.jsonl` are always written. Other sinks are chosen by name (`log.sinks=[csv]`). To add one, write a class and
enter it in SINKS. In a pod of Kubeflow, which offers an address for it, progress is reported there as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from lockstep.errors import unknown_name
from lockstep.launch.jsonl import EVENTS, JsonlSink, read_jsonl
from lockstep.observe.sinks import kubeflow
from lockstep.observe.sinks.csv_sink import CsvSink

__all__ = ["SINKS", "JsonlSink", "RunJsonl", "Sink", "SinkList", "read_jsonl"]


class Sink(Protocol):
    """Receives records. A sink that raises is reported once and dropped."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record, without changing it."""

    def close(self) -> None:
        """Release what the sink holds. No record follows."""


SINKS: dict[str, Callable[[Path], Sink]] = {"csv": CsvSink}  # name -> function of the run folder


class RunJsonl:
    """The sink that every run has: `metrics.jsonl` and `events.jsonl` in its folder."""

    def __init__(self, run_dir: Path):
        self._metrics = JsonlSink(run_dir / "metrics.jsonl")
        self._events = JsonlSink(run_dir / EVENTS)

    def write(self, record: Mapping[str, Any]) -> None:
        (self._events if "event" in record else self._metrics).write(record)

    def close(self) -> None:
        self._metrics.close()
        self._events.close()


class SinkList:
    """The sinks that a run asks for by name, and Kubeflow's. A sink that fails never stops the run."""

    def __init__(self, names: Iterable[str], run_dir: Path | None, report: Callable[[str], None]):
        """Open the sinks. `report` gets one line for each sink that fails later.

        Without `run_dir` the names are only checked: all ranks must refuse an unknown one, but only rank 0 writes.
        """
        self._report = report
        self._sinks: dict[str, Sink] = {}
        for name in names:
            if name not in SINKS:
                raise unknown_name("log.sinks", name, SINKS)
            if run_dir is not None:
                self._sinks[name] = SINKS[name](run_dir)

        if run_dir is not None and kubeflow.is_offered():
            self._sinks["kubeflow"] = kubeflow.KubeflowSink(report)

    def write(self, record: Mapping[str, Any]) -> None:
        self._call("write", record)

    def close(self) -> None:
        self._call("close")
        self._sinks = {}

    def _call(self, method: str, *arguments: Any) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                getattr(sink, method)(*arguments)
            except Exception as error:
                # It is not called again: a service that is down would cost its timeout at every record.
                del self._sinks[name]
                self._report(f"the sink {name} failed and gets no more records: {type(error).__name__}: {error}")
