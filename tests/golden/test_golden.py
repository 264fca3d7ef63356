"""A quick part of the record (`record.py` has all of it): the numbers, the bits and the files are what they were."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from golden.record import CURVES, RUN_FOLDER, differences, files_of, made_with, run_case, unequal_exact

RECORDED = json.loads(CURVES.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


@pytest.fixture(scope="module")
def case(folder: Path) -> Callable[[str], dict[str, Any]]:
    """A case by its name; each is run once, however many tests look at it."""
    known: dict[str, dict[str, Any]] = {}

    def run(name: str) -> dict[str, Any]:
        if name not in known:
            known[name] = run_case(name, folder)
        return known[name]

    return run


@pytest.mark.skipif(
    RECORDED["made_with"] != made_with(), reason="recorded with another Python, whose source char_lm learns, or torch"
)
@pytest.mark.parametrize("name", ["char_lm-1", "char_lm-ddp2", "char_lm-exact2"])
def test_the_curve(case: Callable[[str], dict[str, Any]], name: str) -> None:
    assert not [found.text for found in differences(name, RECORDED["cases"][name], case(name)) if found.fatal]


def test_exact_ends_with_the_same_bits_on_one_rank_and_on_two(case: Callable[[str], dict[str, Any]]) -> None:
    cases = {name: case(name) for name in ("char_lm-exact1", "char_lm-exact2")}
    assert cases["char_lm-exact1"]["tensors"]
    assert not unequal_exact(cases)


@pytest.mark.parametrize(("name", "screen"), [("char_lm-1", "train-1"), ("char_lm-ddp2", "train-2")])
def test_the_run_folder(case: Callable[[str], dict[str, Any]], folder: Path, name: str, screen: str) -> None:
    assert case(name)["exit"] == 0
    recorded = next(part for part in RUN_FOLDER.read_text().split("\n\n") if part.startswith(f"# {screen}\n"))
    assert files_of(folder / name) == recorded.splitlines()[1:]
