"""What a line of the log says of what was not counted."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import lockstep
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.errors import UserError
from lockstep.observe import recorder
from lockstep.observe.metrics import EndedInterval, ExactSums, Sums, exact_from_text, from_exact, metric_terms
from lockstep.observe.recorder import _metrics_line
from lockstep.observe.sinks import read_jsonl
from lockstep.recipes.char_lm import CharLM
from lockstep.task import Loss

ONE = EndedInterval(steps=1, steps_in_sums=1, samples=4, has_skips=False, seconds=1.0, data_wait_s=0.0)


def test_what_nothing_was_counted_for_is_left_out():
    names = ["loss", "cell", "exact"]
    line = _metrics_line(names, [6.0, 3.0, 0.0, 0.0, 1.0, 2.0], replace(ONE, seconds=2.0, weight_before_resume=1.0), {})
    assert line["loss"] == 2.0
    assert (line["weight"], line["weight_per_s"]) == (3.0, 1.0)
    assert line["metrics"] == {"exact": 0.5}


def test_no_outcome_yet_is_not_a_loss_of_nan():
    assert _metrics_line(["loss"], [0.0, 0.0], ONE, {"skipped": 7})["loss"] is None
    assert math.isnan(_metrics_line(["loss"], [0.0, 0.0], replace(ONE, has_skips=True), {"skipped": 9})["loss"])
    assert math.isnan(_metrics_line(["loss"], [math.nan, 4.0], ONE, {})["loss"])


def test_the_rate_of_a_line_counts_the_steps_that_its_weight_has():
    """Ten steps in ten seconds, of weight 6 each. On a GPU the last step of a line is known only in the next one."""
    for in_sums, weight in ((9, 54.0), (10, 60.0), (11, 66.0)):
        line = _metrics_line(["loss"], [1.0, weight], replace(ONE, steps=10, steps_in_sums=in_sums, seconds=10.0), {})
        assert (line["weight"], line["weight_per_s"]) == (weight, 6.0)
    assert _metrics_line(["loss"], [0.0, 0.0], replace(ONE, steps_in_sums=0), {})["weight_per_s"] is None


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


@pytest.mark.parametrize("exact", [False, True])
def test_numbers_of_shape_1_are_summed_like_others(exact):
    sums = ExactSums(cast(Any, None)) if exact else Sums()
    for weight in (2, torch.tensor(2.0), torch.tensor([2.0])):
        loss = Loss(torch.tensor(1.0), weight, {"right": (torch.tensor([1.0]), weight), "wrong": torch.tensor(1.0)})
        sums.add([(loss.total, loss.weight)], list(metric_terms(loss)))
    if exact:
        alone = SimpleNamespace(all_gather_json=lambda local: [local])
        totals = sums.take_global(["loss", "right", "wrong"], cast(Any, alone))
        assert [from_exact(exact_from_text(total)) for total in totals] == [3.0, 6.0] * 3
    else:
        assert sums.take(["loss", "right", "wrong"], torch.device("cpu")).tolist() == [3.0, 6.0] * 3


def test_a_metric_of_several_numbers_is_refused_by_name():
    with pytest.raises(UserError, match=r"the metric 'right' must be one number.*\(3,\)"):
        list(metric_terms(Loss(torch.tensor(1.0), 3, {"right": torch.ones(3)})))
