"""Sinks: where the records of a run go.

A sink gets every record of rank 0: metrics, and events, which have the key `event`. `metrics.jsonl` and
`events.jsonl` are always written. Other sinks are chosen by name (`log.sinks=[tensorboard]`), and run on threads of
their own. To add one, write a class and enter it in SINKS. In a pod of Kubeflow, which offers an address for it,
progress is reported there as well.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from lockstep.errors import UserError, unknown_name
from lockstep.launch.jsonl import EVENTS, JsonlSink, read_jsonl
from lockstep.observe.sinks import kubeflow
from lockstep.observe.sinks.background import BackgroundSink
from lockstep.observe.sinks.csv_sink import CsvSink
from lockstep.observe.sinks.mlflow_sink import MlflowSink
from lockstep.observe.sinks.prometheus import PrometheusSink
from lockstep.observe.sinks.tensorboard_sink import TensorBoardSink
from lockstep.observe.sinks.trackio_sink import TrackioSink
from lockstep.observe.sinks.wandb_sink import WandbSink

__all__ = ["SINKS", "JsonlSink", "RunJsonl", "Sink", "SinkList", "check_sinks", "read_jsonl"]


class Sink(Protocol):
    """Receives records. A sink that raises is reported once and dropped."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record, without changing it."""

    def close(self) -> None:
        """Release what the sink holds. No record follows."""


# Name -> function of the run folder.
SINKS: dict[str, Callable[[Path], Sink]] = {
    "csv": CsvSink,
    "mlflow": MlflowSink,
    "prometheus": PrometheusSink,
    "tensorboard": TensorBoardSink,
    "trackio": TrackioSink,
    "wandb": WandbSink,
}

# The sinks whose package is not installed with Lockstep. Each package is also the name of an extra.
PACKAGES = ("mlflow", "tensorboard", "trackio", "wandb")


def check_sinks(names: Iterable[str]) -> None:
    """Refuse sinks that do not exist, or whose package is missing. Imports none of them: that can take seconds."""
    for name in names:
        if name not in SINKS:
            raise unknown_name("log.sinks", name, SINKS)
        if name in PACKAGES and importlib.util.find_spec(name) is None:
            raise UserError(
                f"log.sinks=[{name}] needs the package {name}, which is not installed",
                "",
                f"pip install 'lockstep-train[{name}]', or leave {name} out of log.sinks",
            )


class RunJsonl:
    """The sink that every run has: `metrics.jsonl` and `events.jsonl` in its folder."""

    def __init__(self, run_dir: Path):
        self._metrics = JsonlSink(run_dir / "metrics.jsonl")
        self._events = JsonlSink(run_dir / EVENTS)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line to one of the two files."""
        sink = self._events if "event" in record else self._metrics
        sink.write(record)

    def close(self) -> None:
        self._metrics.close()
        self._events.close()


class SinkList:
    """The sinks that a run asks for by name, and Kubeflow's. A sink that fails never stops the run."""

    def __init__(self, names: Iterable[str], run_dir: Path | None, report: Callable[[str], None]):
        """Open the sinks. `report` gets one line for each sink that fails later.

        Without `run_dir` the names are only checked: all ranks must refuse an unknown one, but only rank 0 writes.
        """
        self._sinks: list[Sink] = []

        # A name may be listed twice, in a file of settings and on the command line.
        chosen = list(dict.fromkeys(names))
        check_sinks(chosen)
        if run_dir is None:
            return

        # A constructor connects to nothing. That comes with the first record, on the sink's thread.
        for name in chosen:
            self._sinks.append(BackgroundSink(name, SINKS[name](run_dir), report))

        # This one has a thread of its own, which sends only the newest state.
        if kubeflow.is_offered():
            self._sinks.append(kubeflow.KubeflowSink(report))

    def write(self, record: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

        self._sinks = []
