"""`lockstep init`: the file that it writes trains at once, on any number of processes."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

import preloaded
from lockstep import cli
from lockstep.errors import UserError
from lockstep.skeletons import SKELETONS, init

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
TARGETS = {"classifier": "mine.py:Mine", "lm": "mine.py:Mine", "own_loop": "mine.py"}


def command(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    done = preloaded.run(*words, env=ENVIRONMENT, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lm", "own_loop"])  # docs/getting_started.md trains the classifier
def test_it_trains_on_two_processes_at_once(tmp_path, kind):
    command("init", kind, "mine", folder=tmp_path)
    done = command("train", TARGETS[kind], "--nproc", "2", "steps=20", folder=tmp_path)
    losses = [float(line.split("loss")[1].split()[0]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert losses[-1] < losses[0]


@pytest.mark.long
@pytest.mark.parametrize("kind", SKELETONS)
def test_it_passes_verify_as_the_file_says(tmp_path, kind):
    command("init", kind, "mine", folder=tmp_path)
    words = next(line for line in (tmp_path / "mine.py").read_text().splitlines() if line.startswith("lockstep verify"))
    assert words.split()[2] == TARGETS[kind]
    assert "PASS" in command(*words.split()[1:], folder=tmp_path).stdout


def test_the_commands_can_be_copied_whatever_the_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = init("lm", "my model")
    assert "lockstep train 'my model.py:MyModel' --nproc 2\n" in said

    # Both places, as a shell reads them.
    for text in (said, Path("my model.py").read_text()):
        lines = [line.partition("lockstep ")[2] for line in text.splitlines()[:4] if "lockstep " in line]
        train, verify = map(shlex.split, lines)
        assert train == ["train", "my model.py:MyModel", "--nproc", "2"]
        assert verify == ["verify", "my model.py:MyModel", "--worlds", "1,2"]


def test_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, target in (
        ("cats-and_dogs", "cats-and_dogs.py:CatsAndDogs"),
        ("sub/birds.py", "sub/birds.py:Birds"),
        ("task", "task.py:MyTask"),
        ("käfer", "käfer.py:Käfer"),
        (None, "classifier.py:Classifier"),
    ):
        path, _, class_name = target.partition(":")
        said = init("classifier", name)
        assert f"lockstep train {target} --nproc 2" in said
        assert said.splitlines()[0] == f"wrote {path}{', and made the folder sub' if 'sub/' in path else ''}"
        assert f"class {class_name}(Task):" in Path(path).read_text()


@pytest.mark.parametrize("name", ["3", "---", "none"])
def test_a_name_that_no_class_can_have_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no class can be named after"):
        init("lm", name)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("lm.py").write_text("mine")
    assert cli.main(["init", "lm"]) == 2
    assert "lm.py exists already" in capsys.readouterr().err
    assert Path("lm.py").read_text() == "mine"
    with pytest.raises(SystemExit):
        cli.main(["init", "clasifier"])
    assert "classifier" in capsys.readouterr().err
