"""`lockstep launch`: what was typed is checked first, and the command of each node is whole."""

import shlex

import pytest

from lockstep import cli
from lockstep.cli import main
from lockstep.clusters import command


def test_the_command_of_a_node_is_printed(capsys):
    words = ["launch", "nodes", "char_lm", "steps=3", "--nnodes", "2", "--hosts", "a,b", "run_dir=runs/x y"]
    assert main(words) == 0

    out = capsys.readouterr()
    line = next(line for line in out.out.splitlines() if " && lockstep " in line).partition(" && ")[2]
    assert shlex.split(line)[:4] == ["lockstep", "train", "char_lm", "steps=3"]
    assert "run_dir=runs/x y" in shlex.split(line)
    assert "not submitted" in out.err


def test_a_misspelt_key_is_refused_before_anything_is_written(capsys, tmp_path):
    words = ["launch", "nodes", "char_lm", "stepz=3", "--hosts", "a", "--out", str(tmp_path / "job")]
    assert main(words) == 2
    assert "stepz" in capsys.readouterr().err
    assert not (tmp_path / "job").exists()


def test_arguments_of_a_script_follow_two_dashes(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("import lockstep\n\nwith lockstep.start() as run:\n    pass\n")
    assert main(["launch", "nodes", "own.py", "--hosts", "a", "--", "--width", "16"]) == 0
    assert "-- --width 16" in capsys.readouterr().out


@pytest.mark.parametrize("name", command.PLATFORMS)
def test_every_platform_says_what_it_is_for(name, capsys):
    with pytest.raises(SystemExit):
        cli.main(["launch", name, "--help"])
    assert command.platform(name).HELP.split()[0] in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["slurm"], ["ray"], ["kubernetes", "--image", "i", "--pvc", "a:/b"], ["nodes", "--hosts", "a"]]
)
def test_a_class_that_is_no_task_makes_no_job(words, capsys, tmp_path, monkeypatch):
    """It was rendered, and failed on the cluster."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("from torch import nn\n\n\nclass Net(nn.Module):\n    pass\n")
    assert main(["launch", words[0], "net.py:Net", *words[1:], "--out", "job"]) == 2
    assert "the class Net in net.py is not a task" in capsys.readouterr().err
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize("words", [["slurm"], ["ray"], ["kubernetes", "--image", "i", "--pvc", "a:/b"]])
@pytest.mark.parametrize("resume", ["never", "runs/other"])
def test_a_job_that_is_started_again_cannot_begin_anew_each_time(words, resume, capsys, tmp_path, monkeypatch):
    """What was typed was silently replaced by auto."""
    monkeypatch.chdir(tmp_path)
    job = ["launch", words[0], "char_lm", *words[1:], "--nproc", "1", "run_dir=runs/a", "--out", "job"]
    assert main([*job, f"resume={resume}"]) == 2
    assert f"resume={resume} would hold for every start of this job" in capsys.readouterr().err
    (tmp_path / "resume.yaml").write_text(f"resume: {resume}\n")
    assert main([*job, "--config", "resume.yaml"]) == 2
    assert main([*job, "resume=auto"]) == 0
