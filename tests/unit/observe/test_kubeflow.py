"""Progress for Kubeflow: sent over HTTPS by a side thread, seldom, and never at the cost of a run."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lockstep.observe.sinks import SinkList, kubeflow

START = {"event": "start", "steps": 200}
LINE = {"time": 1.0, "step": 50, "loss": 2.5, "lr": 1e-3, "step_s": 0.5, "metrics": {"accuracy": 0.25, "odd": None}}


class Server(ThreadingHTTPServer):
    """Kubeflow's controller, as far as a pod sees it: it knows one token, and keeps what it was sent."""

    def __init__(self, certificate: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.token = "first"
        self.statuses: list[dict[str, Any]] = []
        self.refused = 0
        self.hangs = threading.Event()
        self.woken = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no error of the test."""

    def wait_for(self, count: int) -> list[dict[str, Any]]:
        deadline = time.monotonic() + 60
        while len(self.statuses) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.statuses


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.hangs.is_set():
            self.server.woken.wait(60)
        known = self.headers["Authorization"] == f"Bearer {self.server.token}"
        if known:
            self.server.statuses.append(json.loads(body)["trainerStatus"])
        else:
            self.server.refused += 1
        self.send_response(200 if known else 401)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        [*words.split(), "-keyout", folder / "key.pem", "-out", folder / "cert.pem"], check=True, capture_output=True
    )
    both = folder / "both.pem"
    both.write_text((folder / "cert.pem").read_text() + (folder / "key.pem").read_text())
    return both


@pytest.fixture
def server(certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server, and the variables that a pod has. The pause between two statuses is short."""
    with Server(certificate) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        (tmp_path / "token").write_text("first\n")
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"https://127.0.0.1:{server.server_port}/status")
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(certificate))
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
        monkeypatch.setattr(kubeflow, "INTERVAL_S", 0.01)
        yield server
        server.woken.set()
        server.shutdown()
        thread.join()


def test_progress_arrives(server, tmp_path):
    reports: list[str] = []
    sinks = SinkList([], tmp_path, reports.append)
    sinks.write(START)
    assert server.wait_for(1)[0]["progressPercentage"] == 0
    sinks.write(LINE)
    sinks.write({**LINE, "step": 100, "loss": float("nan"), "lr": 2e-3})
    sinks.write({"event": "eval", "step": 100, "loss": 2.0, "metrics": {"accuracy": 0.5}})
    sinks.close()

    last = server.statuses[-1]
    assert last["progressPercentage"] == 50
    assert last["estimatedRemainingSeconds"] == 50, "100 steps of half a second"
    metrics = {metric["name"]: metric["value"] for metric in last["metrics"]}
    assert metrics == {
        "loss": "2.5",
        "lr": "0.002",
        "step_s": "0.5",
        "accuracy": "0.25",
        "eval_loss": "2",
        "eval_accuracy": "0.5",
    }
    assert last["lastUpdatedTime"].endswith("+00:00")
    assert reports == []


def test_the_last_status_is_sent_at_once_and_the_others_seldom(server, tmp_path, monkeypatch):
    monkeypatch.setattr(kubeflow, "INTERVAL_S", 600.0)
    sinks = SinkList([], tmp_path, pytest.fail)
    sinks.write(START)
    server.wait_for(1)
    for step in range(1, 200):
        sinks.write({**LINE, "step": step})
    assert len(server.statuses) == 1
    sinks.write({"event": "end", "step": 200})
    sinks.close()
    assert [status["progressPercentage"] for status in server.statuses] == [0, 100]


def test_a_token_that_is_replaced_is_read_again(server, tmp_path):
    reports: list[str] = []
    sinks = SinkList([], tmp_path, reports.append)
    server.token = "second"
    sinks.write(START)
    deadline = time.monotonic() + 60
    while not server.refused and time.monotonic() < deadline:
        time.sleep(0.01)

    (tmp_path / "token").write_text("second\n")
    sinks.write(LINE)
    assert server.wait_for(1)[0]["progressPercentage"] == 25
    sinks.close()
    assert len(reports) == 1
    assert "Kubeflow does not take the progress of this run: HTTPError: HTTP Error 401" in reports[0]


def test_a_server_that_does_not_answer_costs_the_run_nothing(server, tmp_path, monkeypatch):
    """With the defaults a request, or the end of a run, may take five seconds; here it may take a twentieth."""
    monkeypatch.setattr(kubeflow, "LAST_S", 0.05)
    server.hangs.set()
    sinks = SinkList([], tmp_path, lambda text: None)
    for step in range(200):
        sinks.write({**LINE, "step": step})
    sinks.close()
    assert server.statuses == []


def test_a_server_with_another_certificate_gets_nothing(server, certificate, tmp_path, monkeypatch):
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=other"
    subprocess.run(
        [*words.split(), "-keyout", tmp_path / "key.pem", "-out", tmp_path / "other.pem"],
        check=True,
        capture_output=True,
    )
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(tmp_path / "other.pem"))
    reports: list[str] = []
    sinks = SinkList([], tmp_path, reports.append)
    sinks.write(START)
    sinks.close()
    assert server.statuses == []
    assert "certificate verify failed" in reports[0]


@pytest.mark.parametrize("missing", [kubeflow.URL, kubeflow.CA_CERT, kubeflow.TOKEN])
def test_elsewhere_nothing_is_sent(missing, server, tmp_path, monkeypatch):
    monkeypatch.delenv(missing)
    assert not kubeflow.KubeflowSink.is_offered()
    sinks = SinkList([], tmp_path, pytest.fail)
    sinks.write(START)
    sinks.close()
    assert server.statuses == []


def test_only_rank_0_reports(server):
    sinks = SinkList([], None, pytest.fail)
    sinks.write(START)
    sinks.close()
    assert server.statuses == []


def test_a_status_keeps_the_limits_of_the_api(server, tmp_path):
    sinks = SinkList([], tmp_path, pytest.fail)
    sinks.write({**LINE, "metrics": {"x" * 100 + str(index): 1 / 3 for index in range(300)}})
    sinks.write({**LINE, "metrics": {f"m{index}": 1 / 3 for index in range(300)}})
    sinks.close()
    metrics = server.statuses[-1]["metrics"]
    assert len(metrics) == 256
    assert all(1 <= len(metric[key]) <= 64 for metric in metrics for key in ("name", "value"))
