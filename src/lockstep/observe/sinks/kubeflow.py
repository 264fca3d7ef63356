"""Progress for Kubeflow: what `kubectl describe trainjob` shows as the trainer's status.

Kubeflow Trainer gives its pods an address for this in three environment variables. A side thread sends the newest
status there, so that a slow or missing server costs the run nothing.
"""

from __future__ import annotations

import io
import json
import math
import os
import ssl
import threading
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep.observe.console import Display
from lockstep.observe.formats import number
from lockstep.observe.sinks.sink import Sink, scalars

URL = "KUBEFLOW_TRAINER_SERVER_URL"
CA_CERT = "KUBEFLOW_TRAINER_SERVER_CA_CERT"  # a file
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # a file, which is replaced now and then

# Kubeflow asks for no more than one status in this time.
INTERVAL_S = 5.0

# How long one request may take, and how long the end of a run waits for the last one.
REQUEST_S = 5.0
LAST_S = 5.0

# The limits of the API: metrics in one status, and characters of a name or a value.
MOST_METRICS = 256
LONGEST = 64


class KubeflowSink(Sink):
    """Sends the progress of a run to Kubeflow. One line says so if that fails.

    Records come faster than Kubeflow takes them, so only the newest status is kept, and one is sent every few seconds.
    A server that is away is tried again with every status.
    """

    @classmethod
    def is_offered(cls) -> bool:
        """Return whether Kubeflow has given this process an address for its status."""
        return all(os.environ.get(name) for name in (URL, CA_CERT, TOKEN))

    def __init__(self, run_dir: Path):
        self._reported = False
        self._progress = Display(0, "", io.StringIO())
        self._metrics: dict[str, str] = {}

        # The thread waits for a status, and sends only the newest one.
        self._status: dict[str, Any] | None = None
        self._changed = threading.Condition()
        self._closing = threading.Event()

        self._thread = threading.Thread(target=self._send_all, name="kubeflow-status", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, Any]) -> None:
        """Take a record. Only a record that changes the progress leads to a new status."""
        match record.get("event"):
            case "start":
                self._progress.total_steps = int(record["steps"])

            case None:
                self._progress.track(record)
                self._metrics |= metrics_of(record)

            case "eval":
                self._metrics |= metrics_of(record)

            case "end":
                self._progress.track(record)

            case _:
                return

        with self._changed:
            # A status that was not sent yet is replaced: only the newest one counts.
            self._status = self._make_status()
            self._changed.notify()

    def close(self) -> None:
        """Send the last status, and wait a moment for that."""
        self._closing.set()
        with self._changed:
            self._changed.notify()

        self._thread.join(LAST_S)

    def _make_status(self) -> dict[str, Any]:
        """Return a status in the words of Kubeflow's API: progress in per cent, seconds left, and metrics as text."""
        steps, left = self._progress.total_steps, self._progress.seconds_left

        status: dict[str, Any] = {}
        if steps:
            # Kubeflow takes whole numbers from 0 to 100.
            step = number(self._progress.last.get("step")) or 0
            status["progressPercentage"] = max(0, min(100, math.floor(100 * step / steps)))

        # The time left is not reported until it is known.
        if left is not None:
            status["estimatedRemainingSeconds"] = math.ceil(left)

        metrics = [{"name": name, "value": text} for name, text in list(self._metrics.items())[:MOST_METRICS]]
        return {**status, "metrics": metrics, "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds")}

    # ---- on the side thread ----

    def _send_all(self) -> None:
        """Send the newest status, and wait. Runs in a thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._status is not None or self._closing.is_set())

                status, self._status = self._status, None

            # Woken without a status: the sink is closed.
            if status is None:
                return

            try:
                send(status)
            except Exception as error:
                # The server may return, so the next status is sent anyway.
                if not self._reported:
                    self._reported = True
                    self.report(f"Kubeflow does not take the progress of this run: {type(error).__name__}: {error}")

            # The last status does not wait its turn: the pod is about to end.
            self._closing.wait(INTERVAL_S)


def metrics_of(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the finite numbers of a record as text, by the names that a task gave them."""
    finite = {name: value for name, value in scalars(record).items() if math.isfinite(value)}
    return {name.replace("/", "_")[:LONGEST]: f"{value:.6g}" for name, value in finite.items()}


def send(status: Mapping[str, Any]) -> None:
    """Post one status. Token and certificate are read each time, because Kubeflow replaces them."""
    request = urllib.request.Request(
        os.environ[URL],
        json.dumps({"trainerStatus": status}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {Path(os.environ[TOKEN]).read_text().strip()}"},
    )

    # Without a proxy: the address is inside the cluster.
    context = ssl.create_default_context(cafile=os.environ[CA_CERT])
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    opener.open(request, timeout=REQUEST_S).close()
