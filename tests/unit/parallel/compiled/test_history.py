"""The record of what compiling cost and gained helps where it can be read and written, and never gets in the way."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from lockstep.parallel.compiled import history
from lockstep.parallel.compiled.decision import LOSS, MODEL, Payoff


def test_a_record_is_found_again(tmp_path):
    path = tmp_path / "cache" / "compile.json"
    history.write("a", LOSS, Payoff(12.34, 1.5), path)
    history.write("a", MODEL, Payoff(9.0, 1.2), path)
    history.write("b", LOSS, Payoff(1.0, 1.1), path)
    assert history.read("a", path) == {LOSS: Payoff(12.34, 1.5), MODEL: Payoff(9.0, 1.2)}
    assert history.read("c", path) == {}
    assert [file.name for file in path.parent.iterdir()] == ["compile.json"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "\x00\xff", '{"a": 3}', '{"a": {"x": {"cost_s": "much"}}}', '{"a": {"x": [1]}}']
)
def test_a_damaged_file_is_no_record_and_is_replaced(content, tmp_path):
    path = tmp_path / "compile.json"
    path.write_text(content)
    assert history.read("a", path) == {}
    history.write("b", LOSS, Payoff(1.0, 2.0), path)
    assert history.read("b", path) == {LOSS: Payoff(1.0, 2.0)}


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    history.write("a", LOSS, Payoff(1.0, 2.0), tmp_path / "file" / "compile.json")
    assert history.read("a", tmp_path / "file" / "compile.json") == {}


def test_old_records_are_dropped(tmp_path):
    path = tmp_path / "compile.json"
    path.write_text(json.dumps({str(n): {} for n in range(history.MOST_MODELS)}))
    history.write("new", LOSS, Payoff(1.0, 2.0), path)
    kept = json.loads(path.read_text())
    assert len(kept) == history.MOST_MODELS
    assert "0" not in kept
    assert "new" in kept


def test_the_key_depends_on_the_model_and_its_batches():
    cpu = torch.device("cpu")
    small, large = nn.Linear(2, 2), nn.Linear(2, 3)
    keys = {
        history.signature(small, cpu, [[4]]),
        history.signature(large, cpu, [[4]]),
        history.signature(small, cpu, [[8]]),
    }
    assert len(keys) == 3
    assert history.signature(nn.Linear(2, 2), cpu, [[4]]) in keys
