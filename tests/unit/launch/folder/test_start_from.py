"""Where a run starts: each setting, at the first attempt and after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.launch.folder.checkpoint_names import MANIFEST
from lockstep.launch.folder.run_dir import GOING_BACK, commit_is_near
from lockstep.launch.folder.start_from import (
    Beginning,
    GoBack,
    Named,
    Newest,
    StartFrom,
    choose_start,
    from_json,
    step_to_go_back_to,
    to_json,
)


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
        ("never", Beginning(), Newest()),
        ("auto", Newest(), Newest()),
        ("this", Newest(), Newest()),
        ("this/checkpoints/step-00000003", GoBack(Path("3")), Newest(Path("3"))),
        ("other", Named(Path("other")), Newest(Path("other"))),
        ("other/checkpoints/step-00000003", Named(Path("3")), Newest(Path("3"))),
    ],
)
def test_where_a_run_starts(runs: Path, resume: str, first: StartFrom, restarted: StartFrom) -> None:
    setting = resume if resume in ("never", "auto") else str(runs / resume)
    for attempt, expected in enumerate([first, restarted]):
        start = choose_start(setting, runs / "this", attempt)
        named = {name: path and Path(setting) for name, path in vars(expected).items()}
        assert start == type(expected)(**named)
        assert from_json(to_json(start)) == start
    goes_back = isinstance(first, GoBack)
    assert step_to_go_back_to(setting, runs / "this") == (3 if goes_back else None)


def test_a_restart_goes_back_again_if_the_attempt_before_died_too_early(runs: Path) -> None:
    named = runs / "this" / "checkpoints" / "step-00000003"
    (runs / "this" / GOING_BACK).touch()
    assert choose_start(str(named), runs / "this", 1) == GoBack(named)


def test_what_is_neither_a_run_nor_a_checkpoint_is_refused(runs: Path) -> None:
    with pytest.raises(UserError, match="names neither a run's folder nor one of its checkpoints"):
        choose_start(str(runs / "nothing"), runs / "this", 0)


def test_a_commit_is_near_when_all_ranks_have_confirmed_until_the_rename(tmp_path: Path) -> None:
    assert not commit_is_near(tmp_path, 2)
    draft = tmp_path / "step-00000004.tmp-a1-1"
    draft.mkdir()
    for name in ("rank-00000.safetensors", "rank-00001.safetensors", "rank-00000.json"):
        (draft / name).touch()
    assert not commit_is_near(tmp_path, 2)
    (draft / "rank-00001.json").touch()
    assert commit_is_near(tmp_path, 2)

    # Rank 0 deletes the confirmations when it has written the manifest.
    (draft / MANIFEST).touch()
    for rank in range(2):
        (draft / f"rank-0000{rank}.json").unlink()
    assert commit_is_near(tmp_path, 2)
    draft = draft.rename(tmp_path / "step-00000004")
    assert not commit_is_near(tmp_path, 2)
    draft.rename(tmp_path / "step-00000004.tmp-a1-gone12")
    assert not commit_is_near(tmp_path, 2)
