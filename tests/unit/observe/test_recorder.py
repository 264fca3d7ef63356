"""What a line of the log says of what was not counted."""

import math

import lockstep
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.observe import recorder
from lockstep.observe.recorder import _metrics_line
from lockstep.observe.sinks import read_jsonl
from lockstep.recipes.char_lm import CharLM


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


def test_a_checkpoint_has_the_metrics_of_its_steps_on_disk(tmp_path, monkeypatch):
    """On a GPU, numbers arrive later than their step: a run that resumes would not write their lines again."""
    monkeypatch.setattr(recorder, "_arrival", lambda tensor: lambda: False)
    on_disk = []
    save = CheckpointManager.save

    def noting(self, *args, **kwargs):
        on_disk.append([line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")])
        return save(self, *args, **kwargs)

    monkeypatch.setattr(CheckpointManager, "save", noting)
    values = {"preset": "tiny", "steps": 6, "checkpoint.every": 2, "log.every": 1, "log.progress": "off"}
    lockstep.fit(CharLM, values, run_dir=tmp_path)
    assert on_disk == [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
