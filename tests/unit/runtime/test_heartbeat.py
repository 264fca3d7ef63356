"""The phase of a rank, as its own code sees it."""

from pathlib import Path

import pytest

from lockstep.runtime.heartbeat import Heartbeat, read


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
