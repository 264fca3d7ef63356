"""MLflow: at MLFLOW_TRACKING_URI, or in `mlflow.db` in the run folder; MLFLOW_EXPERIMENT_NAME names the experiment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config.settings import flatten
from lockstep.observe.sinks.sink import RUN_ID, Sink, run_id, scalars, settings_of

# The tag by which a resumed run finds itself.
TAG = "lockstep.run"


class MlflowSink(Sink):
    """Sends the numbers and the settings of a run to MLflow.

    Without MLFLOW_TRACKING_URI, they go to a database in the run folder.
    """

    package = "mlflow"
    files = ("mlflow.db*", RUN_ID)

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._client: Any = None
        self._id = ""

    def write(self, record: Mapping[str, Any]) -> None:
        """Send the numbers of a record; an event at the end of a run sets its state."""
        numbers = scalars(record)
        if numbers:
            client = self._open()
            from mlflow.entities import Metric

            # MLflow counts time in milliseconds.
            time_ms = int(record["time"] * 1000)
            metrics = [Metric(name, value, time_ms, int(record["step"])) for name, value in numbers.items()]
            client.log_batch(self._id, metrics=metrics)

        # The state comes last: it ends the run in MLflow.
        match record.get("event"):
            case "end":
                self._open().set_terminated(self._id, "FINISHED")
            case "error":
                self._open().set_terminated(self._id, "FAILED")

    def close(self) -> None:
        """Do nothing: every record is sent at once."""

    def _open(self) -> Any:
        """Return the client. The first call finds the run that is resumed, or creates one with the settings."""
        if self._client is not None:
            return self._client

        from mlflow import MlflowClient
        from mlflow.entities import Param

        here = f"sqlite:///{(self._run_dir / 'mlflow.db').resolve()}"
        client = self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", here))

        # Several runs may share an experiment.
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "lockstep")
        experiment = client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)

        # A resumed run appends to its own curves.
        mine = run_id(self._run_dir)
        found = client.search_runs([experiment_id], f"tags.`{TAG}` = '{mine}'", max_results=1)

        if found:
            self._id = found[0].info.run_id
        else:
            run = client.create_run(experiment_id, tags={TAG: mine}, run_name=self._run_dir.resolve().name)
            self._id = run.info.run_id

            settings = flatten(settings_of(self._run_dir))
            params = [Param(key, str(value)) for key, value in settings.items()]

            # A server takes a hundred parameters at a time.
            for first in range(0, len(params), 100):
                client.log_batch(self._id, params=params[first : first + 100])

        return client
