"""What a custom loop says at its start: words that it does not read, and state that a resume does not restore."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.api import LAYERS
from lockstep.files.jsonl import read_jsonl

DATA = TensorDataset(torch.arange(16.0).reshape(16, 1))


class Counter:
    """State of a script's own."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"count": 1}


def train(folder: Path, registered: bool = False, **values: Any) -> list[dict[str, Any]]:
    """Train a loop. Return its events."""
    settings: dict[str, Any] = {"global_batch": 8, "steps": 1, "log.progress": "off", "run_dir": str(folder)}
    with lockstep.start(settings | values) as run:
        model, _ = run.setup(plain := nn.Linear(1, 1), torch.optim.SGD(plain.parameters(), lr=0.01))
        if registered:
            run.register("counter", Counter())

        for step in run.steps(DATA):
            for (x,) in step:
                step.backward(model(x).sum(), weight=len(x))
            step.apply()

    return read_jsonl(folder / "events.jsonl")


def lines_about_state(events: list[dict[str, Any]]) -> list[str]:
    starts = [event["facts"] for event in events if event["event"] == "start"]
    return [facts["not restored"] for facts in starts if "not restored" in facts]


@pytest.mark.parametrize("registered", [False, True])
def test_a_resume_names_what_is_not_restored_only_if_nothing_is_registered(tmp_path: Path, registered: bool) -> None:
    assert lines_about_state(train(tmp_path / "run", registered)) == []
    lines = lines_about_state(train(tmp_path / "run", registered, steps=2, resume="auto"))
    assert len(lines) == (0 if registered else 1)
    assert all("run.register(name, object)" in line for line in lines)


def warnings_about_words(events: list[dict[str, Any]]) -> list[str]:
    return [event["reason"] for event in events if event["event"] == "warning" and "lockstep train" in event["reason"]]


def test_settings_that_a_script_does_not_read_are_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAYERS, raising=False)
    words = ["steps=4", "lr.schedule=linear", "global_batch=8", "width=16", "--steps=9", "steps", "seed="]
    monkeypatch.setattr(sys, "argv", ["my loop.py", *words])
    (warning,) = warnings_about_words(train(tmp_path / "run"))

    # One is what the script sets anyway, and the others are no settings.
    unread = "steps=4 lr.schedule=linear"
    assert warning == f"{unread}: only `lockstep train` reads settings: lockstep train 'my loop.py' {unread}"


@pytest.mark.parametrize("by_command", [False, True])
def test_words_that_are_read_are_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_command: bool) -> None:
    """A script may pass them on itself. What follows `--` of `lockstep train` is its own."""
    monkeypatch.setattr(sys, "argv", ["loop.py", "steps=2" if not by_command else "steps=7"])
    if by_command:
        monkeypatch.setenv(LAYERS, json.dumps([["command line", {"steps": 2}]]))
    else:
        monkeypatch.delenv(LAYERS, raising=False)

    assert warnings_about_words(train(tmp_path / "run", steps=2)) == []
