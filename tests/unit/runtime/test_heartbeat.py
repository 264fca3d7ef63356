"""The phase of a rank, as its own code sees it."""

from pathlib import Path

import pytest

from lockstep.config import resolve
from lockstep.runtime import context
from lockstep.runtime.heartbeat import Heartbeat, read
from lockstep.runtime.world import World


def test_a_visit_returns_to_the_phase_before_it_and_an_error_leaves_it_visible():
    heartbeat = Heartbeat()
    heartbeat.beat("data", 3)
    with heartbeat.visit("snapshot"):
        assert (heartbeat.phase, heartbeat.step) == ("snapshot", 3)
    assert heartbeat.phase == "data"

    with pytest.raises(OSError, match="full"), heartbeat.visit("commit"):
        raise OSError("full")
    assert heartbeat.phase == "commit"


def test_a_resumed_run_has_ended_no_step_before_its_first(tmp_path: Path):
    heartbeat = Heartbeat(tmp_path / "heartbeat-0")
    ended = []
    for step in (500, 500, 501):
        heartbeat.beat("data", step)
        view = read(tmp_path / "heartbeat-0")
        assert view is not None
        ended.append(view.steps_here)
    assert ended == [0, 0, 1]


def test_a_run_that_is_left_is_closed_and_one_that_fails_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCKSTEP_ATTEMPT_FOLDER", str(tmp_path))
    config = resolve([("test", {"device": "cpu"})]).config
    with context.start(World(), config):
        assert phase_of(tmp_path) == "join"
    assert phase_of(tmp_path) == "after run"

    with pytest.raises(OSError, match="full"), context.start(World(), config):
        raise OSError("full")
    assert phase_of(tmp_path) == "join"


def phase_of(folder: Path) -> str:
    view = read(folder / "heartbeat-0")
    assert view is not None
    return view.phase
