"""What a path means that a user has typed. All commands and settings give the same answer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.run_folder.checkpoint_names import MANIFEST
from lockstep.run_folder.paths import RunPath, read_path, run_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with a checkpoint, one that was set aside, and one without a manifest, and a copy elsewhere."""
    run = tmp_path / "run"
    for folder in ("checkpoints/step-00000003", "checkpoints/step-00000002.rewound", "../copy"):
        (run / folder).mkdir(parents=True)
        (run / folder / MANIFEST).touch()
    (run / "checkpoints/step-00000004").mkdir()
    (run / "checkpoints/other").mkdir()
    return run


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("", None),
        ("checkpoints", None),
        ("checkpoints/step-00000003", "step-00000003"),
        ("checkpoints/step-00000002.rewound", "step-00000002.rewound"),
        ("checkpoints/step-00000004", "step-00000004"),
    ],
)
def test_a_run_and_its_checkpoints(run: Path, monkeypatch: pytest.MonkeyPatch, path: str, name: str | None) -> None:
    expected = RunPath(run, run / "checkpoints", name)
    assert read_path(run / path) == expected
    assert run_of(run / path) == run

    # Any folder may be the working folder.
    monkeypatch.chdir(run / path)
    assert resolved(read_path(Path())) == expected
    monkeypatch.chdir(run)
    assert resolved(read_path(Path(path))) == expected


def resolved(found: RunPath) -> RunPath:
    assert found.run is not None
    return RunPath(found.run.resolve(), found.checkpoints.resolve(), found.name)


def test_links_to_checkpoints(run: Path, tmp_path: Path) -> None:
    """The folder of the checkpoints may be a link to one with another name, and a link to a checkpoint anywhere."""
    (run / "checkpoints").rename(tmp_path / "large-disk")
    (run / "checkpoints").symlink_to(tmp_path / "large-disk")
    assert read_path(run / "checkpoints") == RunPath(run, run / "checkpoints")
    assert read_path(run / "checkpoints/step-00000003") == RunPath(run, run / "checkpoints", "step-00000003")

    other = tmp_path / "other/checkpoints/step-00000007"
    other.mkdir(parents=True)
    (other / MANIFEST).touch()
    (tmp_path / "best").symlink_to(other)
    assert read_path(tmp_path / "best") == RunPath(other.parent.parent, other.parent, "step-00000007")


def test_a_checkpoint_that_was_copied_elsewhere_belongs_to_no_run(run: Path) -> None:
    copy = run.parent / "copy"
    assert read_path(copy) == RunPath(None, run.parent, "copy")
    with pytest.raises(UserError, match="names neither a run's folder nor one of its checkpoints"):
        run_of(copy)


@pytest.mark.parametrize("path", ["checkpoints/other", "checkpoints/step-00000009", "checkpoints/latest", "../nothing"])
def test_any_other_path_means_a_run_that_is_not_there(run: Path, path: str) -> None:
    assert read_path(run / path) == RunPath(run / path, run / path / "checkpoints")
    with pytest.raises(UserError, match="names neither a run's folder nor one of its checkpoints"):
        run_of(run / path)


@pytest.mark.parametrize("content", ["checkpoints", "metrics.jsonl"])
def test_a_run_may_be_in_a_folder_called_checkpoints(tmp_path: Path, content: str) -> None:
    run = tmp_path / "checkpoints"
    os.makedirs(run / content)
    assert read_path(run) == RunPath(run, run / "checkpoints")
    assert run_of(run) == run


def test_the_run_that_was_killed_while_it_was_starting(tmp_path: Path) -> None:
    """Its launcher has locked the folder, and rank 0 has not opened it."""
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / ".lock").touch()
    with pytest.raises(UserError, match="that run has not begun to train, and has no checkpoint") as refused:
        run_of(run)
    assert f"run_dir={run} --resume auto" in refused.value.fix
