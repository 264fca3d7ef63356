"""`lockstep runs`: the state of a run by its folder, whatever the folder holds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from run_folders import START, event, make_run

from lockstep.errors import UserError
from lockstep.observe.run_list import age, facts_of, runs
from lockstep.run_folder.locks import hold, is_running, lock
from lockstep.run_folder.names import LAUNCHER_LOCK, LOCK


@contextmanager
def held_elsewhere(run: Path, name: str) -> Iterator[None]:
    """Let another process hold a lock of the run, as a rank or a launcher does."""
    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(done[1])
        with hold(run) if name == LAUNCHER_LOCK else lock(run):
            os.write(ready[1], b"x")
            os.read(done[0], 1)
        os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"x"
        yield
    finally:
        for end in (*ready, *done):
            os.close(end)
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], "killed"),
        ([event("end", step=40)], "finished"),
        ([event("preempted", step=12)], "preempted"),
        ([event("preempted")], "preempted"),
        ([event("error", message="no")], "failed"),
        ([event("error", message="no"), START], "killed"),
        ([event("preempted", step=12), START, event("eval", step=20, loss=1.0), event("end", step=40)], "finished"),
    ],
)
def test_the_last_event_decides_the_state(tmp_path, events, state):
    assert facts_of(make_run(tmp_path / "run", *events)).state == state


@pytest.mark.parametrize("name", [LOCK, LAUNCHER_LOCK])
def test_a_run_whose_folder_is_held_is_running(tmp_path, name):
    run = make_run(tmp_path / "run", event("end", step=40))
    with held_elsewhere(run, name):
        assert facts_of(run).state == "running"
    assert is_running(run) is False
    assert facts_of(run).state == "finished"


def test_without_locks_a_run_that_just_wrote_counts_as_running(tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.observe.run_list.is_running", lambda run: None)
    run = make_run(tmp_path / "run")
    assert facts_of(run).state == "running"
    for name in ("metrics.jsonl", "events.jsonl", "config.yaml"):
        os.utime(run / name, (1.0, 1.0))
    assert facts_of(run).state == "killed"


def test_the_step_is_the_last_one_of_this_attempt(tmp_path):
    run = make_run(tmp_path / "run", event("eval", step=30, loss=1.0), START, event("checkpoint", step=12))
    facts = facts_of(run)
    assert (facts.step, facts.steps, facts.loss) == (12, 40, 0.5)


def test_the_best_evaluation_follows_the_settings(tmp_path):
    evaluations = [
        event("eval", step=step, loss=loss, metrics={"accuracy": accuracy})
        for step, loss, accuracy in ((10, 0.5, 0.2), (20, 0.4, 0.9), (30, None, 0.3), (40, 0.6, 0.1))
    ]
    by_loss = facts_of(make_run(tmp_path / "a", *evaluations))
    assert (by_loss.best_metric, by_loss.best, by_loss.best_step) == ("eval_loss", 0.4, 20)
    config = "checkpoint: {best: accuracy, best_mode: max}\n"
    by_name = facts_of(make_run(tmp_path / "b", *evaluations, config=config))
    assert (by_name.best_metric, by_name.best, by_name.best_step) == ("accuracy", 0.9, 20)
    # The run went back to step 10, and the evaluation of step 20 never happened.
    again = facts_of(make_run(tmp_path / "c", *evaluations[:2], START, event("eval", step=15, loss=0.45)))
    assert (again.best, again.best_step) == (0.45, 15)


def test_settings_are_read_only_if_they_matter(tmp_path, monkeypatch):
    """Reading YAML takes most of the time of a long list."""
    run = make_run(tmp_path / "run", event("eval", step=20, loss=0.4), config="checkpoint: {best: accuracy}\n")
    (run / "config.sources.json").write_text('{"checkpoint.best": "argument", "stop.patience": "default"}')
    assert facts_of(run).best_metric == "accuracy"
    (run / "config.sources.json").write_text('{"checkpoint.best": "default", "stop.patience": "default"}')
    monkeypatch.delattr("lockstep.config.yaml_dialect.load")
    assert facts_of(run).best == 0.4


def test_the_best_evaluation_of_several_sets(tmp_path):
    evaluations = [
        event("eval", step=step, loss=loss, set=name, **({} if name == "val" else {"monitor": False}))
        for step, name, loss in ((10, "val", 0.5), (10, "clean", 0.1), (20, "val", 0.6), (20, "clean", 0.05))
    ]
    assert facts_of(make_run(tmp_path / "a", *evaluations)).best == 0.5
    named = facts_of(make_run(tmp_path / "b", *evaluations, config="checkpoint: {best: clean/loss}\n"))
    assert (named.best_metric, named.best, named.best_step) == ("clean/loss", 0.05, 20)


def test_half_written_and_foreign_folders_do_not_disturb_the_list(tmp_path):
    whole = make_run(tmp_path / "whole", event("end", step=40))
    torn = make_run(tmp_path / "torn")
    (torn / "events.jsonl").write_bytes(b'{"event": "start", "steps": 7}\n\x00\xff[1]\n{"event": "end", "st')
    (torn / "metrics.jsonl").write_text("[" * 100_000)
    (torn / "config.yaml").write_text("{{{")
    (torn / "plan.json").mkdir()
    begun = tmp_path / "begun"
    (begun / "logs").mkdir(parents=True)
    (begun / ".lock").touch()
    (tmp_path / "notes").mkdir()
    (tmp_path / "file.txt").write_text("mine")
    (tmp_path / "link").symlink_to(whole)
    os.mkfifo(tmp_path / "pipe")

    found = {Path(run["path"]).name: run for run in json.loads(runs(tmp_path, as_json=True))}
    assert found.keys() == {"whole", "torn", "begun"}
    assert (found["torn"]["state"], found["torn"]["steps"], found["torn"]["loss"]) == ("killed", 7, None)
    assert found["begun"]["step"] is None

    table = runs(tmp_path, as_json=False).splitlines()
    assert table[0].split() == ["run", "state", "step", "loss", "best", "size", "written"]
    assert len(table) == 4
    assert "finished  40/40" in next(line for line in table if "whole" in line)


def test_one_run_none_and_no_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    assert runs(tmp_path / "empty", as_json=False) == f"no runs in {tmp_path / 'empty'}"
    assert runs(tmp_path / "empty", as_json=True) == "[]"
    assert str(make_run(tmp_path / "run")) in runs(tmp_path / "run", as_json=False)
    with pytest.raises(UserError, match="there is no folder"):
        runs(tmp_path / "missing", as_json=False)


def test_ages():
    assert [age(seconds) for seconds in (-1, 5, 119, 120, 7200, 3 * 86400)] == [
        *("0 s", "5 s", "119 s", "2 min", "2 h", "3 days")
    ]
