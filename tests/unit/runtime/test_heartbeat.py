"""The phase of a rank, as its own code sees it."""

import pytest

from lockstep.runtime.heartbeat import Heartbeat


def test_a_visit_returns_to_the_phase_before_it_and_an_error_leaves_it_visible():
    heartbeat = Heartbeat()
    heartbeat.beat("data", 3)
    with heartbeat.visit("snapshot"):
        assert (heartbeat.phase, heartbeat.step) == ("snapshot", 3)
    assert heartbeat.phase == "data"

    with pytest.raises(OSError, match="full"), heartbeat.visit("commit"):
        raise OSError("full")
    assert heartbeat.phase == "commit"
