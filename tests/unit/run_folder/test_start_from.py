"""Where a run starts: each setting, at the first attempt and after a restart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.loading.resume import Resumer
from lockstep.errors import UserError
from lockstep.run_folder.checkpoint_facts import read_checkpoint_facts
from lockstep.run_folder.checkpoint_names import MANIFEST
from lockstep.run_folder.names import GOING_BACK
from lockstep.run_folder.start_from import StartFrom, choose_start, mark_going_back
from saved import newest_step

BEGINNING = StartFrom()
NEWEST = StartFrom(newest=True)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a folder with two runs, each with a checkpoint."""
    for run in ("this", "other"):
        checkpoint = tmp_path / run / "checkpoints" / "step-00000003"
        checkpoint.mkdir(parents=True)
        (checkpoint / MANIFEST).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("resume", "first", "restarted"),
    [
        ("never", BEGINNING, NEWEST),
        ("auto", NEWEST, NEWEST),
        ("this", NEWEST, NEWEST),
        ("this/checkpoints/step-00000003", StartFrom(named="3", goes_back=True), StartFrom(newest=True, named="3")),
        ("other", StartFrom(named="other"), StartFrom(newest=True, named="other")),
        ("other/checkpoints/step-00000003", StartFrom(named="3"), StartFrom(newest=True, named="3")),
    ],
)
def test_where_a_run_starts(runs: Path, resume: str, first: StartFrom, restarted: StartFrom) -> None:
    setting = resume if resume in ("never", "auto") else str(runs / resume)
    for attempt, expected in enumerate([first, restarted]):
        start = choose_start(setting, runs / "this", attempt)
        assert start == replace(expected, named=setting if expected.named else None)
        assert start == StartFrom(**json.loads(json.dumps(vars(start))))  # rank 0 sends it to the others
    assert choose_start(setting, runs / "this").goes_back_to == ("step-00000003" if first.goes_back else None)


@pytest.mark.parametrize("has_checkpoint", [True, False])
@pytest.mark.parametrize(
    "start",
    [
        BEGINNING,
        NEWEST,
        StartFrom(newest=True, named="otherwise"),
        StartFrom(named="named"),
        StartFrom(named="step-00000003", goes_back=True),
    ],
)
def test_what_is_said_before_the_search_is_what_is_found(start: StartFrom, has_checkpoint: bool) -> None:
    class Finder(Resumer):
        def __init__(self) -> None:
            pass

        storage: Any = "own"

        def _find_in(self, storage: Any, only: str | None = None) -> Any:
            if storage == "own":
                return "newest" if has_checkpoint else None

            return only or storage.root.parent.name

    found = Finder().find(start)
    assert start.will_load(has_checkpoint) == (found is not None)
    assert start.goes_back_to == (found if start.goes_back else None)


def test_a_restart_goes_back_again_if_the_attempt_before_died_too_early(runs: Path) -> None:
    named = runs / "this" / "checkpoints" / "step-00000003"
    (runs / "this" / GOING_BACK).touch()
    assert choose_start(str(named), runs / "this", 1) == StartFrom(named=str(named), goes_back=True)


def test_a_restart_goes_back_even_if_rank_0_never_opened_the_folder(runs: Path) -> None:
    """It was killed while it imported. The restart loaded the newest checkpoint, not the one that was named."""
    checkpoints = runs / "this" / "checkpoints"
    (checkpoints / "step-00000009").mkdir()
    named = checkpoints / "step-00000003"

    mark_going_back(runs / "this", choose_start(str(named), runs / "this").goes_back_to)
    assert newest_step(checkpoints) == 3  # so that step 9 does not count as progress
    assert choose_start(str(named), runs / "this", 1) == StartFrom(named=str(named), goes_back=True)

    # The next job goes on from the newest one.
    mark_going_back(runs / "this", choose_start("auto", runs / "this").goes_back_to)
    assert newest_step(checkpoints) == 9


def test_a_restart_goes_back_to_a_checkpoint_that_was_set_aside_even_if_rank_0_never_opened_the_folder(
    runs: Path,
) -> None:
    """The mark was written only for names of steps. The restart continued the other history."""
    checkpoints = runs / "this" / "checkpoints"
    named = checkpoints / "step-00000003.rewound"
    named.mkdir()
    (named / MANIFEST).touch()

    mark_going_back(runs / "this", choose_start(str(named), runs / "this").goes_back_to)
    assert choose_start(str(named), runs / "this", 1) == StartFrom(named=str(named), goes_back=True)
    assert newest_step(checkpoints) is None  # step 3 is of the other history


def test_what_is_neither_a_run_nor_a_checkpoint_is_refused(runs: Path) -> None:
    with pytest.raises(UserError, match="names neither a run's folder nor one of its checkpoints"):
        choose_start(str(runs / "nothing"), runs / "this", 0)


def test_a_commit_is_near_when_all_ranks_have_confirmed_until_the_rename(tmp_path: Path) -> None:
    assert not read_checkpoint_facts(tmp_path).commit_is_near(2)
    draft = tmp_path / "step-00000004.tmp-a1-1"
    draft.mkdir()
    for name in ("rank-00000.safetensors", "rank-00001.safetensors", "rank-00000.json"):
        (draft / name).touch()
    assert not read_checkpoint_facts(tmp_path).commit_is_near(2)
    (draft / "rank-00001.json").touch()
    assert read_checkpoint_facts(tmp_path).commit_is_near(2)

    # Rank 0 deletes the confirmations when it has written the manifest.
    (draft / MANIFEST).touch()
    for rank in range(2):
        (draft / f"rank-0000{rank}.json").unlink()
    assert read_checkpoint_facts(tmp_path).commit_is_near(2)
    draft = draft.rename(tmp_path / "step-00000004")
    assert not read_checkpoint_facts(tmp_path).commit_is_near(2)
    draft.rename(tmp_path / "step-00000004.tmp-a1-gone12")
    assert not read_checkpoint_facts(tmp_path).commit_is_near(2)
