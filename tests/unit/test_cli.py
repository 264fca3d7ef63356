"""The command as a user types it: what it says about mistakes, and what it does not import."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from lockstep import cli
from lockstep.errors import DeviceLostError


def lockstep(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lockstep.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def forked(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run it in a fork of this process, which has imported the package: half of the time."""
    with (folder / "stdout").open("w+") as stdout, (folder / "stderr").open("w+") as stderr:
        pid = os.fork()
        if pid == 0:
            os.chdir(folder)
            sys.stdout, sys.stderr = stdout, stderr
            os._exit(_exit_code(arguments))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, code, stdout.read(), stderr.read())


def _exit_code(arguments: tuple[str, ...]) -> int:
    try:
        return cli.main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def problems(result: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Problem -> what to do, for each problem on stderr; the command must have been refused."""
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    heading, *found = result.stderr.split("\n- ")
    assert f" {len(found)} problem" in heading
    return {text.splitlines()[0]: text.split("do:")[1].strip() for text in found}


def test_all_mistakes_of_a_command_come_in_one_message():
    both = "global_batch = 8 (command line) and local_batch = 4 (command line): "
    both += "at most one of global_batch, local_batch can be set"
    typed = "train char_lm stepz=10 lr.peak=abc global_batch=8 local_batch=4 foo"
    assert problems(lockstep(*typed.split())) == {
        "foo (command line) has no =": "write key=value, such as steps=1000",
        "stepz = 10 (command line): there is no key stepz": "set steps=10",
        "lr.peak = abc (command line) should be a valid number": "set lr.peak=0.001",
        both: "keep one, such as global_batch=8",
    }


def toy(defaults: dict) -> str:
    """A class that has all a task has, without importing anything."""
    return f"class Toy:\n    model = data = loss = optimizer = unit = None\n    defaults, presets = {defaults}, {{}}\n"


@pytest.mark.parametrize("verb", [["train"], ["config", "show"]])
def test_files_and_words_after_an_option_join_the_list(tmp_path, verb):
    (tmp_path / "a.yaml").write_text("sede: 3\n")
    files = ["--config", "a.yaml", "--config", "b.yaml"]
    found = problems(forked(*verb, "char_lm", "stepz=10", *files, "foo", "presicion=bf16", folder=tmp_path))
    assert found.keys() == {
        "the configuration file b.yaml cannot be read",
        "foo (command line) has no =",
        "sede = 3 (file a.yaml): there is no key sede",
        "stepz = 10 (command line): there is no key stepz",
        "presicion = bf16 (command line): there is no key presicion",
    }
    assert found["sede = 3 (file a.yaml): there is no key sede"] == "set seed=3"
    assert found["presicion = bf16 (command line): there is no key presicion"] == "set precision=bf16"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("nonsense", "invalid choice: 'nonsense'"),
        ("", "VERB"),
        ("train", "required: TARGET\n"),
        ("train char_lm --nporc 2", "lockstep train: error: unrecognized arguments: --nporc (did you mean --nproc?)"),
        ("train char_lm --epochs 3", "--epochs (epochs is a setting, without dashes: epochs=VALUE)"),
        ("train char_lm --micro-batch=3", "(micro_batch is a setting, without dashes: micro_batch=VALUE)"),
        ("launch slurm char_lm --pratition a", "lockstep launch slurm: error: unrecognized arguments: --pratition"),
        ("launch slurm", "required: TARGET\n"),
        ("train char_lm --resume atuo", "use --resume auto"),
        ("train char_lm --nproc 1 --nnodes 2 --join host:99999", "the port 99999; ports are 1 to 65535"),
        ("launch nodes char_lm --hosts a --port 99999", "99999 is not a port"),
        ("launch nodes char_lm", "use --nodes host1,host2; or --hostfile FILE"),
        ("recipes steps=3", "recipes takes no settings such as steps=3"),
        ("report .", "lockstep: . is not the folder of a run"),
        ("report nowhere", "found: no such folder"),
        ("report one two", "report takes one run, and not also two"),
        ("train char_ml", "use char_lm"),
        ("train char_lm --nproc many", "use --nproc 2, --nproc 1..8, or --nproc auto"),
        ("train missing.py:Toy", "no file missing.py"),
        ("train toy.py:Toi", "use toy.py:Toy"),
        ("config show toy.py:Toi", "use toy.py:Toy"),
        ("launch slurm toy.py:Toi --nproc 2", "use toy.py:Toy"),
        ("launch kubernetes toy.py:Toi --image i --nproc 2", "the file toy.py has no class Toi"),
        ("trian char_lm", "(did you mean train?)"),
        ("bench weka char_lm", "(did you mean weak?)"),
        ("launch slurn char_lm", "(did you mean slurm?)"),
        ("init clasifier", "(did you mean classifier?)"),
        ("eval . toy.py:Toy", "(did you mean evaluate?)"),
        ("plan char_lm", "'lab')\n"),
        ("resume runs/one", "'lab')\n"),
        ("train both", "lockstep: the target both is not a recipe\n  found: there is a file both.py"),
        ("train both", "do:    use both.py:Mine\n"),
        ("train loop", "do:    use loop.py\n"),
        ("train 'my tasks'", "do:    use 'my tasks.py:One' or 'my tasks.py:Two'\n"),
        ("train 'my tasks.py:Tow'", "do:    use 'my tasks.py:Two'\n"),
        (
            "evaluate both.py:Mine 'a run'",
            "are swapped: a run is the run or the file of weights, and both.py:Mine the target",
        ),
        ("evaluate both.py:Mine 'a run'", "do:    lockstep evaluate 'a run' both.py:Mine\n"),
        ("evaluate char_lm toy.py", "do:    lockstep evaluate toy.py char_lm\n"),
        ("evaluate nowhere toy.py:Toy", "nothing to evaluate at nowhere: no such file or folder"),
        ("evaluate nowhere char_lm", "nothing to evaluate at nowhere: no such file or folder"),
        ("evaluate . loop.py", "cannot evaluate the script loop.py"),
        ("config show loop.py", "do:    look at config.yaml in the folder of one of its runs"),
        ("config show both.py", "do:    use both.py:Mine, or look at config.yaml"),
        ("train bad.py", "the file bad.py cannot be loaded: line 2: '(' was never closed"),
        ("train bad.py:Toy", "the file bad.py cannot be loaded: line 2: '(' was never closed"),
        ("verify toy.py:Toy -- --width 4", "only a script (lockstep train or verify SCRIPT.py) takes arguments"),
        ("train char_lm --join 127.0.0.1:29400", "--join 127.0.0.1:29400 needs --nnodes"),
    ],
)
def test_a_command_that_cannot_be_run_says_what_to_type(tmp_path, typed, said):
    (tmp_path / "toy.py").write_text(toy({}))
    (tmp_path / "loop.py").write_text("import lockstep\nlockstep.start()\n")
    (tmp_path / "both.py").write_text("import lockstep\nclass Mine(lockstep.Task): ...\nlockstep.start()\n")
    (tmp_path / "bad.py").write_text("import lockstep\nlockstep.start(\n")
    (tmp_path / "my tasks.py").write_text("class One(lockstep.Task): ...\nclass Two(lockstep.Task): ...\n")
    (tmp_path / "a run").mkdir()
    result = forked(*shlex.split(typed), folder=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_the_command_line_is_judged_together_with_the_defaults_of_the_task(tmp_path):
    (tmp_path / "toy.py").write_text(toy({"lr": {"reference_batch": 64}}))
    result = forked("config", "show", "toy.py:Toy", "lr.scaling=sqrt", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in result.stdout.splitlines()}
    assert [value.strip() for value in rows["lr.scaling"]] == ["sqrt", "command line"]
    assert [value.strip() for value in rows["lr.reference_batch"]] == ["64", "task default"]


def test_only_what_differs_from_the_defaults_is_shown_on_request(tmp_path):
    (tmp_path / "toy.py").write_text(toy({"steps": 5, "seed": 0, "precision": "bf16"}))
    result = forked("config", "show", "toy.py:Toy", "--changed", "precision=auto", "lr.peak=0.1", folder=tmp_path)
    assert [line.split(maxsplit=2) for line in result.stdout.splitlines()] == [
        ["steps", "5", "task default"],
        ["lr.peak", "0.1", "command line"],
    ], result.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["train", "--help"], 0),
        (["recipes"], 0),
        (["runs", "/"], 0),
        (["train", "char_lm", "stepz=1"], 2),
    ],
)
def test_what_needs_no_torch_does_not_import_it(arguments, code):
    """Torch takes seconds to import: help and misspelt settings must not wait for it."""
    script = (
        "import sys\n"
        "from lockstep.cli import main\n"
        "try:\n"
        "    code = main(sys.argv[1:])\n"
        "except SystemExit as exit:\n"
        "    code = exit.code\n"
        "print(code, 'torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == f"{code} False"


def test_the_recipes_are_listed_with_a_line_each():
    result = lockstep("recipes")
    assert result.returncode == 0, result.stderr
    listed = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert "char_lm" in listed
    assert all(listed.values())


def test_a_script_gets_its_own_arguments(tmp_path):
    (tmp_path / "loop.py").write_text("import os, sys\nprint(sys.argv, os.environ['LOCKSTEP_LAYERS'])  # no start()\n")
    result = lockstep("train", "loop.py", "steps=3", "--", "--width", "16", "--", "x=1", folder=tmp_path)
    assert result.stdout.startswith("['loop.py', '--width', '16', '--', 'x=1']")
    assert '"steps": 3' in result.stdout
    for typed in ("train char_lm -- --width 16", "resize runs/x 2 -- 3"):
        refused = forked(*typed.split(), folder=tmp_path)
        assert refused.returncode == 2
        assert "only a script" in refused.stderr


def test_a_process_without_its_gpu_ends_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Its tensors cannot be freed: the end of the interpreter would abort it, with another exit code."""

    def lose(options: object, overrides: object) -> None:
        raise DeviceLostError("a kernel stopped", "", "mend it")

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setitem(cli.VERBS, "recipes", lose)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(SystemExit) as ended:
        cli.main(["recipes"])
    assert ended.value.code == 2
    assert "lockstep: a kernel stopped" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["train", "evaluate", "verify"])
def test_a_broken_pipe_of_the_user_is_an_error(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended with code 0 and no word, as if the reader of the output had closed its pipe."""

    def fail(options: object, overrides: object) -> int:
        raise BrokenPipeError("the server of the dataset is gone")

    monkeypatch.setitem(cli.VERBS, verb, fail)
    with pytest.raises(BrokenPipeError):
        cli.main([verb, "char_lm", *(["runs/x"] if verb == "evaluate" else [])])


def test_a_reader_that_closes_its_pipe_ends_a_list() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "lockstep.cli", "recipes"]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")
