"""`lockstep rm`: what it deletes, and what it never touches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from run_folders import event, make_run
from test_run_list import held_elsewhere

from lockstep import cli
from lockstep.checkpoint.command import delete_objects
from lockstep.errors import UserError
from lockstep.observe.run_removal import rm
from lockstep.run_folder.names import LAUNCHER_LOCK, LOCK


def yes(question: str) -> bool:
    return True


def test_a_run_is_deleted_and_what_was_freed_is_said(tmp_path):
    runs = [make_run(tmp_path / name, event("end", step=40)) for name in ("a", "b")]
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    lines, code = rm(runs, False, False, yes, delete_objects)
    assert code == 0
    assert [line.split(":")[0] for line in lines[:2]] == [f"deleted {run}" for run in runs]
    assert lines[2] == f"{size / 1000:.1f} kB freed"
    assert list(tmp_path.iterdir()) == []


def test_what_lockstep_did_not_write_stays(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    run = make_run(tmp_path / "run")
    (run / "notes.md").write_text("mine")
    (run / ".git").mkdir()
    (run / "evaluations").mkdir()  # of lockstep evaluate
    (run / "assets").mkdir()  # of the task's write_assets()
    (run / "samples").symlink_to(outside)
    lines, _ = rm([run], False, False, yes, delete_objects)
    assert sorted(path.name for path in run.iterdir()) == [".git", "notes.md"]
    assert "stays, with what Lockstep did not write: .git, notes.md" in lines[1]
    assert (outside / "precious").read_text() == "mine"


def test_the_records_stay_if_only_checkpoints_go(tmp_path):
    run = make_run(tmp_path / "run")
    lines, _ = rm([run], True, False, yes, delete_objects)
    assert lines == [f"deleted the checkpoints of {run}: 1.0 kB freed"]
    assert not (run / "checkpoints").exists()
    assert {"metrics.jsonl", "events.jsonl", "config.yaml", "logs"} <= {path.name for path in run.iterdir()}


@pytest.mark.parametrize("name", [LOCK, LAUNCHER_LOCK])
def test_nothing_is_deleted_if_one_of_the_runs_is_running(tmp_path, name):
    ended, running = make_run(tmp_path / "ended"), make_run(tmp_path / "running")
    with held_elsewhere(running, name), pytest.raises(UserError, match="is running"):
        rm([ended, running], False, False, yes, delete_objects)
    assert (ended / "metrics.jsonl").exists()
    assert (running / "metrics.jsonl").exists()


def test_a_run_that_begins_while_the_question_is_answered_is_not_deleted(tmp_path):
    run = make_run(tmp_path / "run")
    begun = held_elsewhere(run, LOCK)

    def begin(question: str) -> bool:
        begun.__enter__()
        return True

    with pytest.raises(UserError, match="in use"):
        rm([run], False, False, begin, delete_objects)
    begun.__exit__(None, None, None)
    assert (run / "metrics.jsonl").exists()


def test_a_run_of_another_user_is_refused(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="this user may not write to it"):
        rm([run], False, False, yes, delete_objects)
    assert (run / "checkpoints").exists()


def test_other_folders_and_links_are_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    run = make_run(tmp_path / "run")
    (tmp_path / "link").symlink_to(run)
    for path, said in (
        (tmp_path, "is not the folder of a run"),
        (tmp_path / "missing", "no such folder"),
        (run / "metrics.jsonl", "is not the folder of a run"),
        (tmp_path / "link", "is a symbolic link"),
    ):
        with pytest.raises(UserError, match=said):
            rm([path], False, False, yes, delete_objects)
    assert (run / "metrics.jsonl").exists()


def test_it_asks_and_only_tells_on_request(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run", event("preempted", step=10))
    size = f"{sum(path.stat().st_size for path in run.rglob('*') if path.is_file()) / 1000:.1f} kB"
    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(question)
        return ""

    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", answer)
    assert cli.main(["rm", str(run), "--dry-run"]) == 0
    assert cli.main(["rm", str(run)]) == 1
    assert capsys.readouterr().out.splitlines() == [f"would delete {run} ({size})", "nothing was deleted"]
    assert asked == [f"delete 1 run, {size}: {run} (preempted)? [y/N] "]
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert cli.main(["rm", str(run)]) == 0
    assert not Path(run).exists()


def test_without_a_terminal_it_needs_yes(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run")
    monkeypatch.setattr("sys.stdin", None)
    assert cli.main(["rm", str(run)]) == 2
    assert "add --yes" in capsys.readouterr().err
    assert cli.main(["rm", str(run), "--yes"]) == 0
    assert not run.exists()
