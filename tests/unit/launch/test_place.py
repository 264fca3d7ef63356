"""Which folder a run gets, and when it gets none."""

from pathlib import Path

import pytest

from lockstep.api import resume_command
from lockstep.errors import UserError
from lockstep.launch.run_dir import choose_run_dir


def test_going_on_needs_a_folder_by_name(tmp_path, monkeypatch):
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
def test_what_to_type_to_go_on(words, resume, again):
    assert resume_command(["python", "x.py"], words, resume)(Path("runs/b")) == f"python x.py {again}"
