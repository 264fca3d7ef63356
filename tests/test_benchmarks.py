"""The scripts of `benchmarks` and `tools`: all of them start, some of them run, and a case that hangs is killed."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from faults.launchers import until

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


def test_a_checkpoint_of_many_files_is_written_checked_and_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It uses the parts of a save by themselves, so that nothing else notices when one of them changes."""
    monkeypatch.setattr(sys, "argv", ["scale.py", "--only", "checkpoint", "--parts", "8"])
    runpy.run_path(str(FOLDER / "scale.py"), run_name="__main__")
    assert "checked: lockstep ckpt verify" in capsys.readouterr().out


def commands_that_name(path: Path) -> list[str]:
    """Return the commands of this machine in which this path occurs. A killed process may take a moment to end."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            found.append(file.read_text(errors="replace"))
    return [command for command in found if str(path) in command]


def test_a_case_that_hangs_is_killed_and_what_it_measured_counts(tmp_path: Path) -> None:
    from public.bounded import Bounded, Rows, run_all

    rows = Rows(tmp_path / "rows.jsonl")

    def hang() -> None:
        rows.add(case="hangs", seconds=1.0)
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(600)  # {tmp_path}"])
        time.sleep(600)

    def fail() -> None:
        raise RuntimeError("on purpose")

    cases = [
        Bounded("hangs", hang, limit_s=5),
        Bounded("fails", fail, limit_s=120),
        Bounded("works", partial(rows.add, case="works", seconds=2.0), limit_s=120),
    ]
    began = time.monotonic()
    run_all(cases, rows, total_s=300)
    assert time.monotonic() - began < 290
    assert rows.read() == [
        {"case": "hangs", "seconds": 1.0},
        {"case": "hangs", "failed": "killed after 5 s"},
        {"case": "fails", "failed": "ended with exit code 1"},
        {"case": "works", "seconds": 2.0},
    ]

    # What the case itself has started ends with it.
    until(lambda: not any("sleep" in command for command in commands_that_name(tmp_path)))

    # No time, no case.
    run_all(cases, rows, total_s=1)
    assert [row["failed"] for row in rows.read()[4:]] == ["not begun: the 1 s of this part are over"] * 3


@pytest.mark.long
def test_a_public_model_against_a_loop_by_hand(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "rows.jsonl"
    command = ["public_models.py", "models", "--tiny", "--turns", "1", "--only", "bert", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(FOLDER / "public_models.py"), run_name="__main__")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["loop"], row["steps"]) for row in rows] == [
        *[("lockstep", steps) for steps in (20, 40, 2000)],
        *[("by hand", steps) for steps in (20, 40, 2000)],
        ("lockstep", 2000),  # once more: after turns with the other loop
    ]
    assert all(row["seconds"] > 0 for row in rows)
    assert re.search(r"^ *bert +2,000( +[\d.,]+){5}$", capfd.readouterr().out, re.M)


def test_rows_for_a_gpu_end_in_time_and_continue_where_they_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from on_gpu import Row, results, run_rows

    hanging = tmp_path / "hanging.py"
    hanging.write_text("import os, time\nprint('one row', flush=True)\nos.fork() or os.setpgrp()\ntime.sleep(600)\n")
    rows = [
        Row("works", "{python} -c \"print('x', 1); print('{out}')\"", usual_s=0.5, limit_s=30),
        Row("fails", '{python} -c "import sys; sys.exit(3)"', usual_s=0.5, limit_s=30),
        Row("hangs", f"{{python}} {hanging}", usual_s=0.5, limit_s=5),
        Row("long", "true", usual_s=1000, limit_s=1000),
    ]
    run_rows(rows, tmp_path, {"fails"}, budget_s=100)
    works, hangs = results(tmp_path / "results.jsonl")
    assert (works["row"], works["end"], works["final"]) == ("works", "exit code 0", True)
    assert (hangs["row"], hangs["end"], hangs["final"]) == ("hangs", "killed after 5 s", True)
    assert [works["tail"], hangs["tail"]] == [["x 1", str(tmp_path)], ["one row"]]
    assert "long: not begun, it takes about 1000 s" in capsys.readouterr().out

    # What the row itself has started ended with it, though it had a process group of its own.
    until(lambda: not commands_that_name(hanging))

    # A row that the budget cut short is no result; the next call runs it again.
    run_rows(rows[2:3], tmp_path, set(), budget_s=2)
    cut = results(tmp_path / "results.jsonl")[-1]
    assert (cut["end"], cut["final"]) == ("killed after 2 s", False)


def test_the_rows_for_a_gpu_name_files_and_cases_that_exist() -> None:
    from on_gpu import ROWS
    from public_models import PARTS

    for row in ROWS:
        words = row.command.split()
        assert all((FOLDER.parent / word).exists() for word in words if word.startswith(("benchmarks/", "tests/")))
        if "public_models" in row.command:
            part = PARTS[words[2]]
            assert "--only" not in words or words[words.index("--only") + 1] in part.cases
        assert row.usual_s < row.limit_s


@pytest.mark.long
@pytest.mark.parametrize("part", ["ragged", "packing", "rates", "fp8", "verify"])
def test_every_part_of_the_public_models_runs_at_toy_size(
    part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    if part == "rates":
        pytest.importorskip("torchvision")
    import public_models

    file = tmp_path / "rows.jsonl"
    # timm imports torchvision, which the new processes of `verify` do not find (tests/zoo/torchvision_ops.py).
    left_out = {"vit", "diffusion"} if part == "verify" else set()
    names = [name for name in public_models.PARTS[part].cases if name not in left_out]
    command = ["public_models.py", part, "--tiny", "--turns", "1", "--json", str(file), "--only", *names]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(FOLDER / "public_models.py"), run_name="__main__")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert not [row for row in rows if "failed" in row]
    assert {row["case"] for row in rows} == set(names)
