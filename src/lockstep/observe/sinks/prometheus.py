"""A text endpoint for Prometheus: http://127.0.0.1:PORT/metrics has the newest numbers of the run.

It listens on this machine only. `log.prometheus_port` chooses the port, and `prometheus.url` in the run folder holds
the address.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lockstep.observe.sinks.sink import Sink, scalars, settings_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PrometheusSink(Sink):
    """Keeps the newest value of every number, and serves them while the run lasts.

    The port is `log.prometheus_port`, by default one that the system chooses. The address is in the file
    `prometheus.url` of the run folder, as long as the server runs.
    """

    files = ("prometheus.url",)

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._values: dict[str, float] = {}
        self._server: ThreadingHTTPServer | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        """Take the numbers of a record. The server starts with the first of them."""
        numbers = scalars(record)
        if not numbers:
            return

        # A new dictionary: a request may be reading the old one.
        self._values = self._values | numbers | {"step": float(record["step"])}

        if self._server is None:
            self._server = self._serve()

    def close(self) -> None:
        """Stop the server. Prometheus keeps the numbers that it has read."""
        if self._server is not None:
            # First stop serving, then free the port.
            self._server.shutdown()
            self._server.server_close()
            (self._run_dir / "prometheus.url").unlink(missing_ok=True)

    def text(self) -> str:
        """Return the page that Prometheus reads."""
        run = self._run_dir.resolve().name.replace("\\", r"\\").replace('"', r"\"")

        lines = []

        for name, value in self._values.items():
            # Prometheus allows letters, digits and underscores.
            metric = "lockstep_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            lines += [f"# TYPE {metric} gauge", f'{metric}{{run="{run}"}} {value!r}']

        # Prometheus writes numbers that are not finite in words of its own.
        return "\n".join(lines).replace(" inf", " +Inf").replace(" -inf", " -Inf").replace(" nan", " NaN") + "\n"

    def _serve(self) -> ThreadingHTTPServer:
        """Start the server on a thread, and write its address into the run folder."""
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = sink.text().encode()
                self.send_response(200 if self.path == "/metrics" else 404)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.end_headers()

                if self.path == "/metrics":
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Print nothing: a scrape every few seconds is no news."""

        # Only this machine can read it: metrics are not protected by a password.
        port = settings_of(self._run_dir).get("log", {}).get("prometheus_port", 0)
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)

        # A request that hangs does not keep the process from ending.
        server.daemon_threads = True

        threading.Thread(target=server.serve_forever, name="prometheus", daemon=True).start()

        (self._run_dir / "prometheus.url").write_text(f"http://127.0.0.1:{server.server_port}/metrics\n")
        return server
