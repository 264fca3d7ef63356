"""What a launcher does before its coordinator runs."""

import pytest

from lockstep.launch import supervisor
from lockstep.launch.job import Bounds, Job
from lockstep.launch.wire.messages import JobEnd
from lockstep.run_folder.names import GOING_BACK
from saved import newest_step


@pytest.mark.parametrize(("goes_back_to", "newest"), [("step-00000003", 3), (None, 9)])
def test_the_checkpoint_to_go_back_to_is_marked_before_any_rank_runs(tmp_path, monkeypatch, goes_back_to, newest):
    """A rank that died before rank 0 had opened the folder was restarted from the newest checkpoint."""
    checkpoints = tmp_path / "checkpoints"
    for step in (3, 9):
        (checkpoints / f"step-{step:08d}").mkdir(parents=True)

    (tmp_path / GOING_BACK).write_text("step-00000007")  # of an earlier job, which never did
    seen = []

    class Idle:
        def __init__(self, *arguments):
            seen.append(newest_step(checkpoints))

        def run(self):
            return JobEnd(0)

        def close(self):
            pass

    monkeypatch.setattr(supervisor, "Agent", Idle)
    monkeypatch.setattr(supervisor, "Coordinator", Idle)
    supervisor.supervise(Job({}, tmp_path, Bounds(1, 1), goes_back_to=goes_back_to))
    assert seen[-1] == newest
