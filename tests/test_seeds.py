"""docs/seeds.md is a map of what the documents ask for: nothing is missing on it, and what it names is there."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
# The lines that name a class, method, option, command, script or file.
ASKED = {
    "S0": [10, 11, *range(16, 29), 33, 34, *range(39, 55), *range(59, 72), 77, 102, 119, 122],
    "S1": [*range(3, 10), 15, *range(27, 33), 75],
    "S2": [2, *range(11, 24), 30, 38, *range(60, 66), 92, 102, 110, 118],
}
WAITS_FOR = {"launch scripts", "benchmarks", "planning"}
ROWS = re.findall(r"^\| (S\d-\d+) \| (\w+) \| (.+?) \| (.+?) \|$", (ROOT / "docs" / "seeds.md").read_text(), re.M)


def thing(path: str) -> Any:
    """What a dotted path names: the longest part of it that is a module, and attributes from there."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            found = getattr(found, name)
        return found
    raise AssertionError(f"{path}: no such module")


def help_of(script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return capsys.readouterr().out


def test_no_line_is_missing_and_none_stands_twice():
    numbers = [line for line, *_ in ROWS]
    assert len(numbers) == len(set(numbers))
    width = {"S0": 3, "S1": 2, "S2": 3}
    asked = {f"{seed}-{number:0{width[seed]}}" for seed, lines in ASKED.items() for number in lines}
    assert asked <= set(numbers)


@pytest.mark.parametrize(("line", "kind", "what", "here"), ROWS, ids=[line for line, *_ in ROWS])
def test_what_the_map_names_is_there(line, kind, what, here, capsys, monkeypatch):
    if here.startswith("open"):
        assert here.removeprefix("open: ") in WAITS_FOR
        return
    named = re.fullmatch(r"`(.+)`", here)
    assert named, here
    if option := re.fullmatch(r"(\S+\.py) (--\w+)", named[1]):
        assert re.search(rf"{option[2]}\b", help_of(option[1], capsys, monkeypatch))
    elif argument := re.fullmatch(r"([\w.]+)\((\w+)\)", named[1]):
        assert argument[2] in inspect.signature(thing(argument[1])).parameters
    elif "/" in named[1]:
        assert (ROOT / named[1]).is_file()
    else:
        assert callable(thing(named[1]))


def test_a_wrong_map_would_be_noticed():
    with pytest.raises(AttributeError):
        thing("lockstep.classic.DistributedAMPTrainer.train_step")
    assert "modell" not in inspect.signature(thing("lockstep.classic.DistributedAMPTrainer")).parameters
