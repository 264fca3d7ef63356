"""The restarts of a job that count against its limits."""

from __future__ import annotations

from lockstep.launch.restarts import Restarts


def test_a_new_checkpoint_resets_the_restarts_in_a_row_and_an_earlier_one_does_not():
    restarts = Restarts()
    restarts.note_checkpoint(None)
    restarts.count(0.0, reached_timeout=True)
    assert (restarts.in_a_row, restarts.timeouts_reached) == (1, 1)

    restarts.note_checkpoint(200)
    assert (restarts.in_a_row, restarts.timeouts_reached) == (0, 0)

    # The checkpoint of step 200 was damaged, so that the next attempt has gone back: nothing was gained.
    restarts.count(1.0)
    restarts.note_checkpoint(100)
    assert restarts.in_a_row == 1

    # It saves again, at a step that it had reached before.
    restarts.note_checkpoint(150)
    assert restarts.in_a_row == 0
