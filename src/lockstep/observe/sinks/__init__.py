"""The sinks, to which the records of a run go.

A sink gets every record of rank 0: metrics, and events, which have the key `event`. `metrics.jsonl` and
`events.jsonl` are always written. Other sinks are chosen by name (`log.sinks=[tensorboard]`, or a class of the user's:
`log.sinks=[my_module:MySink]`), and run on threads of their own. One that the platform offers (`Sink.is_offered`), as
Kubeflow does in its pods, is used without being named.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import UserError, pip_install, unknown_name
from lockstep.files.jsonl import JsonlSink, read_jsonl
from lockstep.observe.sinks.background import BackgroundSink
from lockstep.observe.sinks.csv_sink import CsvSink
from lockstep.observe.sinks.kubeflow import KubeflowSink
from lockstep.observe.sinks.mlflow_sink import MlflowSink
from lockstep.observe.sinks.prometheus import PrometheusSink
from lockstep.observe.sinks.sink import Sink
from lockstep.observe.sinks.tensorboard_sink import TensorBoardSink
from lockstep.observe.sinks.trackio_sink import TrackioSink
from lockstep.observe.sinks.wandb_sink import WandbSink
from lockstep.run_folder.names import EVENTS, METRICS
from lockstep.user_classes import import_class, is_class_name

__all__ = ["SINKS", "JsonlSink", "RunJsonl", "Sink", "SinkList", "check_sinks", "read_jsonl"]


# Name -> class, which is called with the run folder.
SINKS: dict[str, type[Sink]] = {
    "csv": CsvSink,
    "kubeflow": KubeflowSink,
    "mlflow": MlflowSink,
    "prometheus": PrometheusSink,
    "tensorboard": TensorBoardSink,
    "trackio": TrackioSink,
    "wandb": WandbSink,
}


def check_sinks(names: Iterable[str]) -> None:
    """Refuse sinks that do not exist, that are not offered here, or whose package is missing.

    Imports nothing: a package can take seconds, and a user's class may be next to the task.
    """
    for name in names:
        if is_class_name(name):
            continue

        if name not in SINKS:
            raise unknown_name("log.sinks", name, [*SINKS, "MODULE:CLASS"], is_list=True)

        sink = SINKS[name]
        if sink.is_offered() is False:
            raise UserError(
                f"log.sinks=[{name}] cannot be used here",
                "the platform offers no address for it; where it does, it is used without being named",
                f"leave {name} out of log.sinks",
            )

        if sink.package and importlib.util.find_spec(sink.package) is None:
            raise UserError(
                f"log.sinks=[{name}] needs the package {sink.package}, which is not installed",
                "",
                f"{pip_install(sink.package)}, or leave {name} out of log.sinks",
            )


def _find(name: str) -> type[Sink]:
    """Return the class of a sink by its name; MODULE:CLASS is a user's class."""
    return SINKS[name] if name in SINKS else import_class(f"log.sinks=[{name}]", name, ("write", "close"))


class RunJsonl(Sink):
    """The sink that every run has: `metrics.jsonl` and `events.jsonl` in its folder."""

    def __init__(self, run_dir: Path):
        self._metrics = JsonlSink(run_dir / METRICS)
        self._events = JsonlSink(run_dir / EVENTS)

    def write(self, record: Mapping[str, Any]) -> None:
        # Events are the records that have this key.
        file = self._events if "event" in record else self._metrics
        file.write(record)

    def close(self) -> None:
        self._metrics.close()
        self._events.close()


class SinkList:
    """The sinks that a run names, and the sinks that the platform offers. One that fails never stops the run."""

    def __init__(self, names: Iterable[str], run_dir: Path | None, report: Callable[[str], None]):
        """Open the sinks. `report` gets one line for each sink that fails later.

        Without `run_dir` the names are only checked: all ranks must refuse an unknown one, but only rank 0 writes.
        """
        self._sinks: list[BackgroundSink] = []

        # A sink that is named twice gets each record once.
        names = list(names)
        check_sinks(names)
        offered = [name for name, sink in SINKS.items() if sink.is_offered()]
        chosen = {name: _find(name) for name in [*names, *offered]}
        if run_dir is None:
            return

        # Each on a thread of its own, so that a slow service never holds up training.
        for name, sink in chosen.items():
            self._sinks.append(BackgroundSink(name, sink(run_dir), report))

    def write(self, record: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

        self._sinks = []
