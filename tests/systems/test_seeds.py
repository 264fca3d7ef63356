"""requirements.md says where each requirement of the seed documents is met: it is complete, and its names exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lockstep.recipes.hrm.arguments import overrides
from lockstep.recipes.hrm.build import Build, build
from pretrain import load_synced_config

ROOT = Path(__file__).parent.parent.parent
# The requirements that ask for working software or for a page, and others that name something here or are open.
REQUIRED = {
    "S0": "5-34 39-126 133-141 147-151",
    "S1": "3-9 15 27-34 48-54 66-73 75 78-81 84-88",
    "S2": "2 6 8 11-24 29-47 49-51 60-69 86 92 102 110 118 125-129 143",
    "S3": "2-10 13 19-24 26 29-33 35 37 41-42 46-54 67 69 71-72 74 79-82 85 89-92 112-119 128-133 139",
    "S4": "1-285",
}
WIDTH = {"S0": 3, "S1": 2, "S2": 3, "S3": 3, "S4": 3}
DEFECTS = [*(f"E-{number:02}" for number in range(1, 13)), *(f"D-{number:02}" for number in range(1, 10))]
WAITS_FOR = {"benchmarks", "several GPUs", "mpi"}
PAGE = Path(__file__).with_name("requirements.md").read_text()
ROWS = re.findall(r"^\| (S\d-\d+) \| (\w+) \| (.+?) \| (.+?) \|$", PAGE, re.M)
DEFECT_ROWS = re.findall(r"^\| ([DE]-\d+) \| .+? \| (.+?) \|$", PAGE, re.M)


def resolve_path(path: str) -> Any:
    """Return what a dotted path names: the longest prefix of it that is a module, and attributes from there."""
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


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def check_test(name: str) -> None:
    path, _, function = name.partition("::")
    assert function in functions_of(path), name


def check_file(path: str) -> None:
    """Check that a file exists, that code can be imported, and that a shell script can be parsed."""
    assert (ROOT / path).is_file()
    if path.startswith("src/"):
        importlib.import_module(path.removeprefix("src/").removesuffix(".py").replace("/", "."))
    elif path.endswith((".sh", ".slurm")):
        subprocess.run(["bash", "-n", ROOT / path], check=True)


def help_of(script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return capsys.readouterr().out


def check_setting(key: str, text: str, data: str) -> None:
    """Check that `pretrain.py` knows a setting by name, and that another value of it makes another run."""
    found = load_synced_config(overrides([f"data_path={data}", f"{key}={text}"]), rank=0, world_size=1)
    assert key not in found.rest
    if key == "data_path":
        assert found.options()[key] == found.data_path == text
        return
    value = json.loads(text)
    assert getattr(found, key) == value
    values = {"run_name": "same", "eval_interval": 1, "data_path": data, "global_batch_size": 2}
    runs = [
        load_synced_config(values | {key: other}, rank=0, world_size=1).settings()
        for other in (value, not value if isinstance(value, bool) else 2 * value)
    ]
    assert runs[0] != runs[1]


@pytest.fixture(scope="module")
def puzzles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("puzzles")
    build(Build(out=str(folder), puzzle="sudoku4", holes=6, train_size=4, test_size=2))
    return str(folder)


def numbers(lines: str) -> list[int]:
    ends = [part.partition("-") for part in lines.split()]
    return [number for first, _, last in ends for number in range(int(first), int(last or first) + 1)]


def test_every_requirement_has_exactly_one_row():
    there = [line for line, *_ in ROWS]
    assert len(there) == len(set(there))
    required = {f"{seed}-{number:0{WIDTH[seed]}}" for seed, lines in REQUIRED.items() for number in numbers(lines)}
    assert required <= set(there)
    assert [defect for defect, _ in DEFECT_ROWS] == DEFECTS


@pytest.mark.parametrize(("line", "kind", "what", "here"), ROWS, ids=[line for line, *_ in ROWS])
def test_what_a_row_names_exists(line, kind, what, here, puzzles, capsys, monkeypatch):
    if here.startswith("open"):
        assert here.removeprefix("open: ") in WAITS_FOR
        return
    assert re.fullmatch(r"`[^`]+`(, `[^`]+`)*", here), here
    for named in re.findall(r"`([^`]+)`", here):
        if "::" in named:
            check_test(named)
        elif option := re.fullmatch(r"(\S+\.py) (--\w+)", named):
            assert re.search(rf"{option[2]}\b", help_of(option[1], capsys, monkeypatch))
        elif setting := re.fullmatch(r"systems/hrm/pretrain\.py (\w+)=(\S+)", named):
            check_setting(setting[1], setting[2], puzzles)
        elif page := re.fullmatch(r"(\S+\.(?:md|slurm)) (.+)", named):
            assert page[2] in (ROOT / page[1]).read_text(), f"{page[1]} does not say {page[2]}"
        elif argument := re.fullmatch(r"([\w.]+)\((\w+)\)", named):
            assert argument[2] in inspect.signature(resolve_path(argument[1])).parameters
        elif "/" in named:
            check_file(named)
        else:
            assert callable(resolve_path(named))


@pytest.mark.parametrize(("defect", "tests"), DEFECT_ROWS, ids=[defect for defect, _ in DEFECT_ROWS])
def test_every_defect_is_ruled_out_by_a_test(defect, tests):
    found = re.findall(r"`([^`]+)`", tests)
    assert found
    for name in found:
        check_test(name)


def test_a_wrong_row_would_be_noticed(puzzles):
    with pytest.raises(AttributeError):
        resolve_path("lockstep.classic.DistributedAMPTrainer.train_step")
    assert "modell" not in inspect.signature(resolve_path("lockstep.classic.DistributedAMPTrainer")).parameters
    with pytest.raises(AssertionError):
        check_test("tests/test_classic.py::test_that_does_not_exist")
    with pytest.raises(AssertionError):
        check_setting("learning_rate", "1e-4", puzzles)
