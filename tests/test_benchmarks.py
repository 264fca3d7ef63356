"""The benchmarks: all of them start, and what they share does what they trust it to do."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text())


@pytest.fixture(autouse=True)
def beside_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python does it for a script; what they share they import from their own folder."""
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def turns(beside_the_scripts: None) -> ModuleType:
    import turns

    return turns


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_says_how_it_is_used(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(FOLDER / script), run_name="__main__")
    assert f"usage: {script}" in capsys.readouterr().out


def test_loops_that_take_turns_in_a_real_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpt2_speed.py", "--tiny", "--turns", "2", "--attention", "torch"])
    runpy.run_path(str(FOLDER / "gpt2_speed.py"), run_name="__main__")
    said = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", said)]
    assert len(losses) == 6  # two loops: two turns to warm up, and the last one
    assert all(5.5 < loss < 7.0 for loss in losses)  # about log(512): hardly anything is learnt from noise
    assert re.search(r"^ratio +\d+\.\d{4} ", said, re.M)


def test_who_begins_alternates_and_warm_up_is_not_counted(turns: ModuleType) -> None:
    order: list[str] = []

    def loop(name: str) -> Iterator[int]:
        for number in range(99):
            order.append(name)
            yield number

    loops = {"a": loop("a"), "b": loop("b")}
    found = turns.take_turns(loops, 3, warm_up=1, meet=lambda: order.append("-"))
    assert "".join(order) == "ab" + "-a-b" + "-b-a" + "-a-b"
    assert [turn.value for turn in found["b"]] == [1, 2, 3]
    assert len(turns.take_turns(loops, 9, warm_up=0, limit_s=-1.0)["a"]) == 1
    assert turns.median_ratio([2.0, 9.0, 1.0], [1.0, 3.0, 1.0]) == 2.0


def test_of_settings_with_the_same_key_the_last_counts(beside_the_scripts: None) -> None:
    from trainings import command

    words = command("char_lm", Path("there"), "steps=3", "task.width=8", "steps=5", ranks=2)
    assert words[1:] == [
        *("-m", "lockstep.cli", "train", "char_lm", "--nproc", "2"),
        *("steps=5", "task.width=8", "run_dir=there"),
    ]
    assert "--nproc" not in command("char_lm", Path("there"))
