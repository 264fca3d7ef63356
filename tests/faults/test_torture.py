"""A kill in every phase of a step and of a save, in one run (a hundred kills in `make test-long`): it ends, with every
sample trained once and the same bits as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults import torture


@pytest.mark.timeout(600)
def test_nine_kills_leave_no_trace_in_the_model(tmp_path: Path) -> None:
    steps = 48
    faults = torture.planned(9, steps, seed=1)
    assert {fault.phase for fault in faults} == {*torture.IN_A_STEP, *torture.IN_A_SAVE}
    whole = torture.train(tmp_path / "whole", steps, [])
    torn = torture.train(tmp_path / "torn", steps, faults, timed_kills=1)
    assert (whole.code, torn.code) == (0, 0), torn.output[-4000:]
    assert torn.restarts >= 9
    assert torn.samples == whole.samples
    first, *_ = counts = torture.counted(torn.samples).values()
    assert all(most == 1 for _, most in counts)
    assert first[0] == 5993  # the whole first epoch
    assert torn.weights == whole.weights
