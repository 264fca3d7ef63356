"""JSON lines: what is written comes back, whatever happens in between."""

from __future__ import annotations

import csv
import json
import math
import resource
import threading
import time
import tomllib
import urllib.request
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.config import RunConfig, to_yaml
from lockstep.engine.checks.names import check_names
from lockstep.errors import UserError
from lockstep.observe import sinks as sinks_package
from lockstep.observe.run_removal import OURS, rm
from lockstep.observe.sinks import SINKS, JsonlSink, RunJsonl, SinkList, background, read_jsonl
from lockstep.observe.sinks.prometheus import PrometheusSink
from lockstep.observe.sinks.sink import scalars, settings_of

RECORD = {"time": 1763179421.5, "step": 120, "loss": 2.3141, "skipped": 0, "metrics": {"accuracy": 0.31}}


def test_records_come_back_as_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonlSink(path) as sink:
        sink.write(RECORD)
        assert read_jsonl(path) == [RECORD], "a reader sees the line before the file is closed"
        sink.write({"text": "two\nlines \u2028 é", "none": None})
    assert len(path.read_text().split("\n")) == 3
    assert read_jsonl(path)[1] == {"text": "two\nlines \u2028 é", "none": None}


def test_nonfinite_numbers_are_null_with_a_mark(tmp_path):
    path = tmp_path / "metrics.jsonl"
    record = {"loss": math.nan, "none": None, "metrics": {"a": math.inf, "b": 1.0}, "list": [2.0, -math.inf]}
    with JsonlSink(path) as sink:
        sink.write(record)

    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    raw = json.loads(path.read_text(), parse_constant=no_constants)
    assert raw["loss"] is None
    assert raw["_nonfinite"] == {"loss": "nan", "metrics.a": "inf", "list.1": "-inf"}
    (back,) = read_jsonl(path)
    assert math.isnan(back.pop("loss"))
    assert back == {"none": None, "metrics": {"a": math.inf, "b": 1.0}, "list": [2.0, -math.inf]}


def test_numpy_scalars_and_paths_can_be_written(tmp_path):
    numpy = pytest.importorskip("numpy")
    with JsonlSink(tmp_path / "x.jsonl") as sink:
        sink.write({"a": numpy.float32(1.5), "b": numpy.int64(3), "c": Path("x/y"), "d": numpy.float32("nan")})
    (back,) = read_jsonl(tmp_path / "x.jsonl")
    assert (back["a"], back["b"], back["c"]) == (1.5, 3, "x/y")
    assert math.isnan(back["d"])


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_truncated_last_line_is_left_out_and_then_mended(tmp_path, cut):
    path = tmp_path / "events.jsonl"
    whole = b'{"a": 1}\n{"b": 22}\n'
    path.write_bytes(whole[:-cut])
    kept = [{"a": 1}, {"b": 22}] if cut == 1 else [{"a": 1}]
    assert read_jsonl(path) == kept
    with JsonlSink(path) as sink:
        sink.write({"c": 3})
    assert read_jsonl(path) == [*kept, {"c": 3}]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_torn_line_longer_than_a_block_is_mended(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": 1}\n{"text": "' + "x" * 200_000)
    with JsonlSink(path) as sink:
        sink.write({"b": 2})
    assert read_jsonl(path) == [{"a": 1}, {"b": 2}]


def test_damage_in_the_middle_is_said_with_its_line(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": 1}\n{"b": \n{"c": 3}\n')
    with pytest.raises(UserError, match=r"line 2 is not a JSON object"):
        read_jsonl(path)


def test_a_full_disk_raises_and_leaves_whole_lines(tmp_path):
    path = tmp_path / "events.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with JsonlSink(path) as sink:
        sink.write({"a": 1})
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (30, limits[1]))
            with pytest.raises(OSError, match="File too large"):
                sink.write({"text": "x" * 100})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sink.write({"b": 2})
    assert read_jsonl(path) == [{"a": 1}, {"b": 2}]


def test_a_closed_sink_refuses(tmp_path):
    sink = JsonlSink(tmp_path / "x.jsonl")
    sink.close()
    sink.close()
    with pytest.raises(ValueError, match="closed"):
        sink.write({})


# ---- sinks by name ----


ROOT = Path(__file__).parents[3]


class Line(lockstep.Task):
    defaults = {"global_batch": 16, "steps": 2}

    def model(self):
        return nn.Linear(1, 1)

    def data(self):
        x = torch.linspace(-1, 1, 32)[:, None]
        return TensorDataset(x, 3 * x)

    def loss(self, model, batch):
        x, y = batch
        return lockstep.Loss(((model(x) - y) ** 2).sum(), weight=len(x))


class Fragile:
    """Keeps records, and breaks at the second one."""

    def __init__(self, run_dir):
        self.records = []

    def write(self, record):
        if self.records:
            raise ConnectionError("the service is down")
        self.records.append(record)

    def close(self):
        raise AssertionError("a sink that was dropped is not called again")


def test_a_run_keeps_metrics_and_events_apart(tmp_path):
    sink = RunJsonl(tmp_path)
    sink.write(RECORD)
    sink.write({"event": "eval", "loss": 1.0})
    sink.close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == [RECORD]
    assert read_jsonl(tmp_path / "events.jsonl") == [{"event": "eval", "loss": 1.0}]


def test_a_failing_sink_is_reported_once_and_dropped(tmp_path, monkeypatch):
    reports = []
    sinks = SinkList(["test_sinks:Fragile", "csv"], tmp_path, reports.append)
    for step in range(4):
        sinks.write(RECORD | {"step": step})
    sinks.close()
    assert reports == [
        "the sink test_sinks:Fragile failed and gets no more records: ConnectionError: the service is down"
    ]
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 5, "the others go on"


def test_a_run_writes_to_a_sink_that_the_user_brings(tmp_path, monkeypatch):
    (tmp_path / "own_sink.py").write_text(
        "class Losses:\n"
        "    def __init__(self, run_dir):\n"
        "        self.path = run_dir / 'losses.txt'\n"
        "    def write(self, record):\n"
        "        if 'loss' in record and 'event' not in record:\n"
        "            with self.path.open('a') as file:\n"
        "                print(record['step'], file=file)\n"
        "    def close(self):\n"
        "        pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    lockstep.fit(Line, run_dir=tmp_path / "run", log={"sinks": ["own_sink:Losses"], "every": 1, "progress": "off"})
    assert (tmp_path / "run" / "losses.txt").read_text() == "1\n2\n"

    # Its class is not imported only to find out what it wrote.
    lines, _ = rm([tmp_path / "run"], False, False, lambda text: True, lambda run: None)
    assert "losses.txt" in lines[1]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no_such_module:Sink", "there is no module no_such_module"),
        ("test_sinks:Missing", "has no class Missing"),
        ("test_sinks:Line", "the class Line lacks write, close"),
    ],
)
def test_a_class_that_is_no_sink_is_refused_on_every_rank(tmp_path, name, problem):
    for run_dir in (tmp_path, None):
        with pytest.raises(UserError, match=problem):
            SinkList([name], run_dir, pytest.fail)


def test_each_sink_says_what_it_needs_and_what_it_writes():
    """The package has an extra, which the message names; and `lockstep rm` deletes the files."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for sink in SINKS.values():
        assert sink.package is None or any(wanted.startswith(sink.package) for wanted in extras[sink.package])
        assert set(sink.files) <= set(OURS)


def test_a_sink_of_the_platform_is_refused_where_it_is_not_offered(monkeypatch):
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    with pytest.raises(UserError, match="the platform offers no address for it"):
        check_names([("command line", {"log": {"sinks": ["kubeflow"]}})])


def test_an_unknown_sink_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"log\.sinks=\[cvs\](.|\n)*set log\.sinks=\[csv\]"):
        SinkList(["cvs"], tmp_path, print)
    with pytest.raises(UserError, match=r"log\.sinks=\[cvs\]"):
        SinkList(["cvs"], None, print)  # a rank that writes nothing
    SinkList(["csv"], None, print).write(RECORD)
    assert not list(tmp_path.iterdir())


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_a_column_for_every_key_whenever_it_appears(tmp_path):
    sink = SINKS["csv"](tmp_path)
    sink.write(RECORD)
    sink.write({"event": "eval", "loss": 1.0})
    sink.write({"step": 130, "loss": math.nan, "metrics": {"accuracy": 0.5, "two\nlines, and a comma": 1}})
    sink.close()
    again = SINKS["csv"](tmp_path)  # a resumed run
    again.write({"step": 140, "scale": 2.0})
    found = rows(tmp_path / "metrics.csv")
    assert [row["step"] for row in found] == ["120", "130", "140"]
    assert [row["metrics.accuracy"] for row in found] == ["0.31", "0.5", ""]
    assert [row["loss"] for row in found] == ["2.3141", "nan", ""]
    assert found[1]["metrics.two\nlines, and a comma"] == "1"
    assert found[2]["scale"] == "2.0"


# ---- sinks on threads of their own ----


class Slow:
    """Takes a record only when it is allowed to."""

    def __init__(self, run_dir):
        self.allowed = threading.Event()
        self.records = []
        SLOW.append(self)

    def write(self, record):
        self.allowed.wait()
        self.records.append(record["step"])

    def close(self):
        self.records.append("closed")


SLOW: list[Slow] = []


def test_a_sink_that_blocks_holds_nothing_up_and_gets_all_records_in_order(tmp_path, monkeypatch):
    reports = []
    sinks = SinkList(["test_sinks:Slow", "csv"], tmp_path, reports.append)
    for step in range(5):
        sinks.write(RECORD | {"step": step})  # would hang here if it waited
    SLOW[-1].allowed.set()
    sinks.close()
    assert SLOW[-1].records == [0, 1, 2, 3, 4, "closed"]
    assert not reports


def test_a_sink_that_never_answers_is_left_behind_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "LAST_S", 0.1)
    reports = []
    sinks = SinkList(["test_sinks:Slow"], tmp_path, reports.append)
    sinks.write(RECORD)
    sinks.close()
    SLOW[-1].allowed.set()
    assert reports == [
        "the sink test_sinks:Slow failed and gets no more records: it did not take the last records within 0 s"
    ]


def test_a_sink_that_falls_too_far_behind_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "MOST_WAITING", 3)
    reports = []
    sinks = SinkList(["test_sinks:Slow"], tmp_path, reports.append)
    for step in range(20):
        sinks.write(RECORD | {"step": step})
    SLOW[-1].allowed.set()
    assert reports == ["the sink test_sinks:Slow failed and gets no more records: it is 3 records behind"]
    sinks.close()


def test_a_full_queue_is_emptied_before_the_sink_is_closed(tmp_path, monkeypatch):
    """Records fill the queue exactly, so none of them was refused. The service answers only after `close` has begun."""
    monkeypatch.setattr(background, "MOST_WAITING", 3)
    reports = []
    sinks = SinkList(["test_sinks:Slow"], tmp_path, reports.append)
    sinks.write(RECORD | {"step": 0})
    while not sinks._sinks[-1]._waiting.empty():  # the thread takes the first one, and waits for the service
        time.sleep(0.001)
    for step in (1, 2, 3):
        sinks.write(RECORD | {"step": step})
    threading.Timer(0.05, SLOW[-1].allowed.set).start()
    sinks.close()
    assert SLOW[-1].records == [0, 1, 2, 3, "closed"]
    assert not reports


def test_a_missing_package_is_named_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(SINKS["csv"], "package", "csv")
    monkeypatch.setattr(sinks_package.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package csv(.|\n)*pip install .*\[csv\]'"):
        check_names([("command line", {"log": {"sinks": ["csv"]}})])


def test_scalars_are_numbers_by_name():
    assert scalars(RECORD | {"done": True}) == {"loss": 2.3141, "skipped": 0.0, "accuracy": 0.31}
    evaluation = {"event": "eval", "step": 3, "time": 1.0, "loss": math.inf, "metrics": {"accuracy": 0.5}}
    assert scalars(evaluation) == {"eval/loss": math.inf, "eval/accuracy": 0.5}
    assert scalars({"event": "checkpoint", "step": 3, "mb": 1.0}) == {}

    # A metric does not take the place of a number of the run.
    clash = {"step": 3, "loss": 2.0, "lr": 0.5, "metrics": {"lr": 7.0, "accuracy": 0.5}}
    assert scalars(clash) == {"loss": 2.0, "lr": 0.5, "metrics.lr": 7.0, "accuracy": 0.5}


def test_prometheus_serves_the_newest_numbers_on_this_machine_only(tmp_path):
    sink = PrometheusSink(tmp_path / "")
    sink.write({"event": "start", "steps": 3})
    sink.write(RECORD)
    sink.write({"event": "eval", "step": 121, "loss": math.nan, "metrics": {"top-1": 0.5}})
    url = (tmp_path / "prometheus.url").read_text().strip()
    assert url.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(url) as answer:
        text = answer.read().decode()
    run = tmp_path.name
    assert f'lockstep_loss{{run="{run}"}} 2.3141\n' in text
    assert f'lockstep_eval_top_1{{run="{run}"}} 0.5\n' in text
    assert f'lockstep_eval_loss{{run="{run}"}} NaN\n' in text
    assert f'lockstep_step{{run="{run}"}} 121.0\n' in text
    sink.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url)
    assert not (tmp_path / "prometheus.url").exists()


@pytest.mark.slow
def test_tensorboard_has_the_curves_and_a_resumed_run_goes_on(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in [(1, 2, 3), (3, 4)]:  # the second process repeats step 3
        sink = SINKS["tensorboard"](tmp_path)
        for step in steps:
            sink.write(RECORD | {"step": step, "loss": 1.0 / step})
        sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]
    assert [event.value for event in events.Scalars("accuracy")] == pytest.approx([0.31] * 4)


@pytest.mark.slow
def test_wandb_offline_keeps_a_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = SINKS["wandb"](tmp_path)
    sink.write(RECORD)
    sink.close()
    (offline,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(offline.glob("*.wandb"))


def test_a_service_gets_the_settings_as_they_were_typed(tmp_path):
    """In YAML 1.1 the first would be a date, and the second eight."""
    options = {"day": "2024-01-01", "code": "010"}
    (tmp_path / "config.yaml").write_text(to_yaml(RunConfig(task=options)))
    assert settings_of(tmp_path)["task"] == options


@pytest.mark.slow
def test_mlflow_has_the_numbers_and_the_settings_once(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "config.yaml").write_text("lr:\n  peak: 0.1\n")
    for step in (1, 2):  # a second process
        sink = SINKS["mlflow"](tmp_path)
        sink.write(RECORD | {"step": step})
        sink.write({"event": "end", "step": step, "time": 1.0})
        sink.close()
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("lockstep").experiment_id])
    assert run.data.params == {"lr.peak": "0.1"}
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "accuracy")] == [1, 2]
    assert run.info.status == "FINISHED"
