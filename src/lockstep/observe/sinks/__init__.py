"""Sinks: where the records of a run go.

A sink gets every record of rank 0: metrics, and events, which have a key `event`. `metrics.jsonl` and `events.jsonl`
are always written. Further sinks are chosen by name (`log.sinks=[csv]`); a new one is a class and an entry in SINKS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from lockstep.errors import unknown_name
from lockstep.observe.sinks.csv_sink import CsvSink
from lockstep.observe.sinks.jsonl import JsonlSink, RunJsonl, read_jsonl

__all__ = ["SINKS", "JsonlSink", "RunJsonl", "Sink", "SinkList", "read_jsonl"]


class Sink(Protocol):
    """Takes records. It may raise: it is then reported once and dropped."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record. It must not be changed."""

    def close(self) -> None:
        """End the sink. No record follows."""


# name -> function of the run folder
SINKS: dict[str, Callable[[Path], Sink]] = {
    "csv": CsvSink,
}


class SinkList:
    """The sinks that a run has asked for by name. A sink that fails never stops the run."""

    def __init__(self, names: Iterable[str], run_dir: Path | None, report: Callable[[str], None]):
        """Open the sinks. `report` gets one line for each sink that fails later.

        Without `run_dir` the names are only checked: all ranks must refuse an unknown one, and one of them writes.
        """
        self._report = report
        self._sinks: dict[str, Sink] = {}
        for name in names:
            if name not in SINKS:
                raise unknown_name("log.sinks", name, SINKS)
            if run_dir is not None:
                self._sinks[name] = SINKS[name](run_dir)

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
                # A service that is down would cost its timeout at every record: it is not asked again.
                del self._sinks[name]
                self._report(f"the sink {name} has failed and gets no more records: {type(error).__name__}: {error}")
