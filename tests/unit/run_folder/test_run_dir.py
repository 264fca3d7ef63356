"""Which folder a run gets, and when it gets none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import api
from lockstep.api import make_resume_command
from lockstep.config import resolve
from lockstep.errors import UserError
from lockstep.launch.failure import Failure, LauncherFailure
from lockstep.launch.job import Bounds, Job
from lockstep.launch.supervisor import Outcome
from lockstep.launch.wire.messages import JobEnd
from lockstep.run_folder import locks, run_dir
from lockstep.run_folder.locks import break_locks, has_launcher, hold, lock
from lockstep.run_folder.names import WRITTEN
from lockstep.run_folder.resize import ask_for_size
from lockstep.run_folder.run_dir import choose_run_dir, prepare


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


def test_runs_that_start_in_the_same_second_get_different_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_dir.time, "strftime", lambda form: "20260101-000000")
    chosen = [choose_run_dir(None, "never", "net") for _ in range(20)]
    assert len(set(chosen)) == 20

    # Only asked for: nothing is made, as for a job that is printed and not started.
    assert not run_dir.new_run_dir("net").exists()
    assert not choose_run_dir(None, "never", "net", make=False).exists()


@pytest.mark.parametrize(
    ("words", "resume", "again"),
    [
        (["train", "net", "--resume", "runs/a"], ["--resume", "auto"], "train net run_dir=runs/b --resume auto"),
        (["x.py", "--", "--resume", "a"], ["--resume", "auto"], "x.py run_dir=runs/b --resume auto -- --resume a"),
        (["run_dir=runs/b", "--auto_resume"], ["--auto_resume"], "run_dir=runs/b --auto_resume"),
    ],
)
def test_what_to_type_to_resume(words, resume, again):
    assert make_resume_command(["python", "x.py"], words, resume)(Path("runs/b")) == f"python x.py {again}"


HOLDER = """
import sys
from pathlib import Path
from lockstep.run_folder.locks import hold
with hold(Path(sys.argv[1])):
    print("holds", flush=True)
    sys.stdin.read()
"""


def test_a_wish_for_another_size_needs_a_launcher_and_no_rank(tmp_path):
    """Between two attempts no rank holds the folder, and the launcher does."""
    (tmp_path / ".lock").touch()
    with pytest.raises(UserError, match="no launcher"):
        ask_for_size(tmp_path, 3)
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout.readline() == b"holds\n"
        ask_for_size(tmp_path, 3)
        assert has_launcher(tmp_path)
    assert (tmp_path / "resize").read_text() == "3\n"
    with pytest.raises(UserError, match="the run is not running"):
        ask_for_size(tmp_path, 3)


def test_a_folder_is_held_by_one_launcher_until_its_job_is_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.run_folder.locks.LAUNCHER_WAIT_S", 0.2)
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout.readline() == b"holds\n"
        with pytest.raises(UserError, match="a launcher whose job is there right now"), hold(tmp_path):
            pass
        break_locks(tmp_path)
        with hold(tmp_path):
            assert (tmp_path / ".launcher").exists()


def test_a_wait_for_another_launcher_is_announced(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("lockstep.run_folder.locks.LAUNCHER_WAIT_S", 0.8)
    monkeypatch.setattr("lockstep.run_folder.locks.SILENT_S", 0.2)
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout.readline() == b"holds\n"
        with pytest.raises(UserError, match="in use by another run"), hold(tmp_path):
            pass
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"lockstep: run_dir={tmp_path} is in use by a launcher whose job is there right now")
    assert line.endswith("waiting up to 1 s for its end")


def test_a_lock_that_is_removed_while_one_waits_for_it_is_made_anew(tmp_path):
    held = lock(tmp_path)
    (tmp_path / ".lock").unlink()
    again = lock(tmp_path)
    assert (tmp_path / ".lock").stat().st_ino == os.fstat(again.fileno()).st_ino != os.fstat(held.fileno()).st_ino


def test_a_launcher_that_waited_for_a_file_that_was_removed_waits_for_the_next(tmp_path, monkeypatch):
    """It held nothing, and trained beside the successor of the job that it had waited for."""
    monkeypatch.setattr("lockstep.run_folder.locks.LAUNCHER_WAIT_S", 0.2)
    acquire, successors = locks._acquire, []

    def taken_over_meanwhile(file, timeout):
        if timeout == 0.2 and not successors:
            break_locks(tmp_path)
            command = [sys.executable, "-c", HOLDER, str(tmp_path)]
            successors.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert successors[0].stdout.readline() == b"holds\n"
        return acquire(file, timeout)

    monkeypatch.setattr(locks, "_acquire", taken_over_meanwhile)
    try:
        with pytest.raises(UserError, match="a launcher whose job is there right now"), hold(tmp_path):
            pass
    finally:
        successors[0].communicate()


@pytest.mark.parametrize(
    ("rank", "coordinated", "recorded"),
    [(1, True, ["rank 1: it broke"]), (None, True, ["it broke"]), (1, False, []), (None, False, [])],
)
def test_the_launcher_that_coordinates_records_the_error(tmp_path, monkeypatch, rank, coordinated, recorded):
    """A lost node is no rank; and the other launchers have the same folder."""
    ending = JobEnd(1, Failure.by_launcher(LauncherFailure.EXIT, "it broke", rank, "host-a"))
    outcome = Outcome(ending, coordinated)
    monkeypatch.setattr(api, "supervise", lambda job: outcome)
    assert api._launch(Job({}, tmp_path, Bounds(1, 1))) == outcome
    events = tmp_path / "events.jsonl"
    lines = events.read_text().splitlines() if events.exists() else []
    assert [json.loads(line)["message"] for line in lines] == recorded


def stored_run(folder: Path, config: str, sources: dict[str, str]) -> Path:
    (folder / "config.yaml").write_text(config)
    (folder / "config.sources.json").write_text(json.dumps(sources))
    (folder / "plan.json").write_text('{"samples": 64}')
    (folder / "metrics.jsonl").touch()
    (folder / ".lock").touch()
    return folder


def test_a_resumed_run_takes_over_what_was_typed_for_it(tmp_path, capfd):
    config = "steps: 300\nseed: 7\nlr: {peak: 0.5}\ntask: {width: 16}\nrun_dir: runs/x\nglobal_batch: 8\n"
    typed = {"steps": "command line", "lr.peak": "file a.yaml", "task.width": "run runs/w", "run_dir": "command line"}
    run = stored_run(tmp_path, config, typed | {"seed": "default", "global_batch": "task default"})
    ((source, values),) = api.stored_layer(str(run), [("command line", {"steps": 400})])
    assert values == {"steps": 300, "lr.peak": 0.5, "task.width": 16}
    assert capfd.readouterr().err == f"lockstep: taken over from {run}: lr.peak=0.5 task.width=16\n"
    resolved = resolve([(source, values), ("command line", {"steps": 400})])
    assert (resolved.config.steps, resolved.config.lr.peak) == (400, 0.5)
    assert resolved.sources["lr.peak"] == f"run {run}"
    assert api.stored_layer("auto", []) == []


@pytest.mark.parametrize(
    ("config", "count", "said"),
    [
        ("mesh: {tp: 2}\nsteps: 9\nglobal_batch: 8\n", 3, "3 is not a multiple of 2"),
        ("ddp: {static_graph: true}\nmicro_batch: 2\nsteps: 9\nglobal_batch: 8\n", 2, "micro-batches per rank"),
    ],
)
def test_a_size_that_does_not_fit_is_refused_before_anybody_is_asked(tmp_path, config, count, said):
    run = stored_run(tmp_path, config, {})
    with pytest.raises(UserError, match=said):
        api.resize(run, count)
    assert not (run / "resize").exists()
    with pytest.raises(UserError, match="no launcher"):
        api.resize(run, 4)


# Folders from somebody else

INSIDE = ["logs/rank-0.log", "checkpoints/latest", "checkpoints/step-00000001", "profile/rank-0.json"]


@pytest.mark.parametrize("name", [*(pattern.replace("*", "x") for pattern in WRITTEN), "metrics.csv", *INSIDE])
def test_a_run_writes_through_no_link(tmp_path, name):
    """Not even if the link leads to a file that is there, or to a folder."""
    run, victim = tmp_path / "run", tmp_path / "victim"
    victim.mkdir()
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).symlink_to(victim)
    with pytest.raises(
        UserError, match=f"Lockstep would write through {name}, which is not a file\n.*symbolic link -> {victim}"
    ):
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


BOMB = "a0: &a0 {x: 1, y: 1}\n" + "".join(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}\n" for i in range(1, 60))


@pytest.mark.parametrize("name", ["config.yaml", "config.sources.json"])
@pytest.mark.parametrize("how", ["a pipe", "a device", "too deep", "no mapping", "a bomb"])
def test_settings_of_somebody_elses_run_are_read_with_care(tmp_path, name, how):
    """`--resume RUN` and `lockstep resize RUN` read them, whoever wrote them."""
    path = stored_run(tmp_path, "steps: 3\n", {"steps": "command line"}) / name
    path.unlink()
    match how:
        case "a pipe":
            os.mkfifo(path)
        case "a device":
            path.symlink_to("/dev/zero")
        case "too deep":
            path.write_text('{"a": ' * 900 + "1" + "}" * 900)
        case "no mapping":
            path.write_text("[1]")
        case _:
            path.write_text(BOMB)
    with pytest.raises(UserError, match=f"the file {name} of the run {tmp_path} cannot be read"):
        api.stored_layer(str(tmp_path), [])
    if name == "config.yaml":
        with pytest.raises(UserError, match="cannot be read"):
            api.resize(tmp_path, 2)


def test_a_setting_that_was_saved_under_a_former_name_is_taken_over(tmp_path):
    """The error would name the new key, and typing that would not help: the old one would still be read."""
    config = "steps: 3\nglobal_batch: 8\ncheckpoint: {storage: 'file:///x'}\n"
    run = stored_run(tmp_path, config, {"checkpoint.storage": "command line"})
    ((_, values),) = api.stored_layer(str(run), [])
    assert values == {"checkpoint.store": "file:///x"}
    with pytest.raises(UserError, match="no launcher"):
        api.resize(run, 2)


def test_sources_of_any_type_and_a_plan_without_samples_are_no_accident(tmp_path):
    run = stored_run(tmp_path, "steps: 3\n", {"steps": 3})
    assert api.stored_layer(str(run), []) == []
    (run / "plan.json").write_text("{}")
    with pytest.raises(UserError, match="no launcher"):
        api.resize(run, 2)


def test_settings_that_are_taken_over_cannot_steer_the_terminal(tmp_path, capfd):
    run = stored_run(tmp_path, 'task: {text: "\\e]0;evil\\a"}\n', {"task.text": "command line"})
    ((_, values),) = api.stored_layer(str(run), [])
    assert values == {"task.text": "\x1b]0;evil\x07"}
    assert r"task.text=\x1b]0;evil\x07" in capfd.readouterr().err


@pytest.mark.parametrize("how", ["a link", "a pipe"])
def test_the_launchers_lock_is_a_file(tmp_path, how):
    """`lockstep resize` opens it in any folder that is named."""
    (tmp_path / ".lock").touch()
    if how == "a link":
        (tmp_path / ".launcher").symlink_to(tmp_path / "made")
    else:
        os.mkfifo(tmp_path / ".launcher")
    with pytest.raises(UserError, match="cannot be written to"):
        ask_for_size(tmp_path, 2)
    assert not (tmp_path / "made").exists()
