"""The records of what compiling has cost and gained on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.parallel.compiled.facts import MOST_MODELS, model_key, read_records, write_record
from lockstep.parallel.compiled.payoff import Payoff
from lockstep.parallel.compiled.targets import LOSS, MODEL


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the history, in a cache folder of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lockstep" / "compile.json"


def test_a_record_is_found_again(path):
    write_record("a", LOSS, Payoff(12.34, 1.5))
    write_record("a", MODEL, Payoff(9.0, 1.2, cold_cost_s=20.0))
    write_record("b", LOSS, Payoff(1.0, 1.1))
    assert read_records("a") == {LOSS: Payoff(12.34, 1.5), MODEL: Payoff(9.0, 1.2, cold_cost_s=20.0)}
    assert read_records("c") == {}
    assert [file.name for file in path.parent.iterdir()] == ["compile.json"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "\x00\xff", '{"a": 3}', '{"a": {"x": {"cost_s": "much"}}}', '{"a": {"x": [1]}}']
)
def test_a_damaged_file_is_no_record_and_is_replaced(content, path):
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert read_records("a") == {}
    write_record("b", LOSS, Payoff(1.0, 2.0))
    assert read_records("b") == {LOSS: Payoff(1.0, 2.0)}


def test_a_folder_that_cannot_be_written(path, tmp_path):
    (tmp_path / "cache").write_text("in the way")
    write_record("a", LOSS, Payoff(1.0, 2.0))
    assert read_records("a") == {}


def test_old_records_are_dropped(path):
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({str(n): {} for n in range(MOST_MODELS)}))
    write_record("new", LOSS, Payoff(1.0, 2.0))
    kept = json.loads(path.read_text())
    assert len(kept) == MOST_MODELS
    assert "0" not in kept
    assert "new" in kept


def test_the_key_depends_on_the_model_and_its_batches():
    cpu = torch.device("cpu")
    small, large = nn.Linear(2, 2), nn.Linear(2, 3)
    keys = {
        model_key(small, cpu, [[4]]),
        model_key(large, cpu, [[4]]),
        model_key(small, cpu, [[8]]),
    }
    assert len(keys) == 3
    assert model_key(nn.Linear(2, 2), cpu, [[4]]) in keys
