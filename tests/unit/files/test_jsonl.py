"""The launcher's events, in the file that rank 0 writes as well."""

import json
import os
import threading
import time

from lockstep.files import jsonl
from lockstep.files.jsonl import read_jsonl
from lockstep.run_folder.events import append_event


def test_events_are_appended_line_by_line(tmp_path):
    append_event(tmp_path / "run", {"event": "failure", "rank": 1})
    append_event(tmp_path / "run", {"event": "restart"})
    first, second = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert json.loads(first)["rank"] == 1
    assert json.loads(second).keys() == {"time", "event"}
    assert os.listdir(tmp_path / "run") == ["events.jsonl"]


def test_an_event_that_cannot_be_written_is_dropped(tmp_path):
    (tmp_path / "run").touch()
    append_event(tmp_path / "run", {"event": "restart"})
    assert (tmp_path / "run").read_text() == ""


def test_nobody_else_may_write_events(tmp_path):
    before = os.umask(0)
    try:
        append_event(tmp_path / "run", {"event": "restart"})
    finally:
        os.umask(before)
    assert (tmp_path / "run" / "events.jsonl").stat().st_mode & 0o777 == 0o644


def test_an_event_is_not_glued_to_a_line_that_a_killed_rank_left(tmp_path):
    """The file could not be read any more."""
    (tmp_path / "events.jsonl").write_text('{"event": "start"}\n{"event": "ev')
    append_event(tmp_path, {"event": "failure", "time": 12.0})
    assert read_jsonl(tmp_path / "events.jsonl") == [{"event": "start"}, {"time": 12.0, "event": "failure"}]


def test_a_line_that_is_being_written_is_not_taken_for_a_torn_one(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "sta')
    pause, waits = time.sleep, threading.Event()

    def sleep(seconds: float) -> None:
        if not waits.is_set():
            waits.set()
            with path.open("a") as file:
                file.write('rt"}\n')
        pause(seconds)

    monkeypatch.setattr(jsonl.time, "sleep", sleep)
    append_event(tmp_path, {"event": "failure"})
    assert waits.is_set()
    assert [event["event"] for event in read_jsonl(path)] == ["start", "failure"]
