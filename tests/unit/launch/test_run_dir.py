"""Which folder a run gets, and when it gets none."""

import os
from pathlib import Path

import pytest

from lockstep.api import resume_command
from lockstep.errors import UserError
from lockstep.launch.run_dir import choose_run_dir, lock, prepare


def test_resume_auto_needs_a_folder_by_name(tmp_path, monkeypatch):
    """A job that is queued again would begin at step 0 each time; torchrun's own names are new each time, too."""
    monkeypatch.chdir(tmp_path)
    assert choose_run_dir("here", "auto", "net") == Path("here")
    with pytest.raises(UserError, match=r"add run_dir=FOLDER, the same each time$"):
        choose_run_dir(None, "auto", "net")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "3334f589-d064-43a0-8703-bd783dd7bfd3")
    left = tmp_path / "runs" / "net-20260101-000000"
    left.mkdir(parents=True)
    (left / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="or run_dir=runs/net-20260101-000000, the newest one that has not ended"):
        choose_run_dir(None, "auto", "net")
    assert choose_run_dir(None, "never", "net").name.startswith("net-3334f589")


@pytest.mark.parametrize(
    ("words", "resume", "again"),
    [
        (["train", "net", "--resume", "runs/a"], ["--resume", "auto"], "train net run_dir=runs/b --resume auto"),
        (["run_dir=runs/b", "--auto_resume"], ["--auto_resume"], "run_dir=runs/b --auto_resume"),
    ],
)
def test_what_to_type_to_resume(words, resume, again):
    assert resume_command(["python", "x.py"], words, resume)(Path("runs/b")) == f"python x.py {again}"


# Folders from somebody else

WRITTEN = ["metrics.jsonl", ".lock", "config.yaml", "logs/rank-0.log", "checkpoints/latest", "checkpoints", "logs"]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_run_writes_through_no_link(tmp_path, name):
    """Not even if the link leads to a file that is there, or to a folder."""
    run, victim = tmp_path / "run", tmp_path / "victim"
    victim.mkdir()
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).symlink_to(victim)
    with pytest.raises(UserError, match=f"would write through {name}, which is no file\n.*symbolic link -> {victim}"):
        prepare(run)
    assert list(victim.iterdir()) == []


def test_a_pipe_is_refused_before_anybody_waits_for_it(tmp_path):
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(UserError, match="a pipe or a device"):
        prepare(tmp_path)


def test_the_users_own_links_beside_the_run_are_no_business_of_ours(tmp_path):
    (tmp_path / "data").symlink_to("/usr")
    prepare(tmp_path)


def test_a_run_folder_may_be_a_link_itself(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    prepare(tmp_path / "run")
    assert (tmp_path / "disk" / "logs").is_dir()


@pytest.mark.parametrize("how", ["a link", "a pipe"])
def test_the_lock_is_a_file(tmp_path, how):
    """`lockstep resize` looks at it in any folder that is named."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    if how == "a link":
        (tmp_path / ".lock").symlink_to(victim)
    else:
        os.mkfifo(tmp_path / ".lock")
    with pytest.raises(UserError, match="cannot be written to"):
        lock(tmp_path)
    assert victim.read_text() == "precious"
