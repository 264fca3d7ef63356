"""What a line of the log says of what was not counted."""

import math

from lockstep.observe.recorder import _metrics_line


def test_what_nothing_was_counted_for_is_left_out():
    names = ["loss", "cell", "exact"]
    line = _metrics_line(names, [6.0, 3.0, 0.0, 0.0, 1.0, 2.0], 2.0, {}, 1.0, skipped=0)
    assert line["loss"] == 2.0
    assert (line["weight"], line["weight_per_s"]) == (3.0, 1.0)
    assert line["metrics"] == {"exact": 0.5}


def test_no_outcome_yet_is_not_a_loss_of_nan():
    assert _metrics_line(["loss"], [0.0, 0.0], 1.0, {"skipped": 7}, 0.0, skipped=0)["loss"] is None
    assert math.isnan(_metrics_line(["loss"], [0.0, 0.0], 1.0, {"skipped": 9}, 0.0, skipped=2)["loss"])
    assert math.isnan(_metrics_line(["loss"], [math.nan, 4.0], 1.0, {}, 0.0, skipped=0)["loss"])
