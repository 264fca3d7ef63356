"""The scripts of `benchmarks` and `tools`: all of them start, and one of them runs."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
FOLDERS = (FOLDER, FOLDER.parent / "tools")
SCRIPTS = sorted(path for folder in FOLDERS for path in folder.glob("*.py") if "__main__" in path.read_text())


@pytest.fixture(autouse=True)
def beside_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python does it for a script; what they share they import from their own folder."""
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_says_how_it_is_used(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script.name, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(script), run_name="__main__")
    assert f"usage: {script.name}" in capsys.readouterr().out


def test_loops_that_take_turns_in_a_real_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpt2_speed.py", "--tiny", "--turns", "2", "--attention", "torch"])
    runpy.run_path(str(FOLDER / "gpt2_speed.py"), run_name="__main__")
    said = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"\b(\d\.\d{4})\b", said.partition("ratio")[0])]
    assert len(losses) == 6  # two loops: two turns to warm up, and the last one
    assert all(5.5 < loss < 7.0 for loss in losses)  # about log(512): hardly anything is learnt from noise
    assert re.search(r"^ratio \d+\.\d{4} ", said, re.M)
