"""The three ways to train, through the real commands and real processes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import preloaded
from lockstep import Task, UserError, _version, api, fit
from lockstep.errors import Preempted, RanksFailed
from lockstep.launch.failure import Failure, LauncherFailure
from lockstep.launch.job import Bounds
from lockstep.launch.wire.messages import JobEnd

ROOT = Path(__file__).parent.parent
TASK = '''
import os
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import lockstep

class Fit(lockstep.Task):
    """A regression with ragged weights."""
    defaults = {"steps": 12, "global_batch": 10, "micro_batch": 2, "clip": {"norm": 0.5}, "log": {"every": 4}}

    def __init__(self, width: int = 8, crash: str = ""):
        self.width, self.crash = width, crash

    def model(self):
        return nn.Sequential(nn.Linear(4, self.width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(self.width, 1))

    def data(self):
        g = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(33, 4, generator=g), torch.randint(0, 3, (33,), generator=g))

    def eval_data(self):
        return self.data()

    def loss(self, model, batch):
        x, w = batch
        if self.crash == os.environ.get("RANK"):
            self.fail()
        total = ((model(x)[:, 0] - x.sum(1)) ** 2 * w).sum()
        return lockstep.Loss(total, w.sum(), {"error": ((model(x)[:, 0] - x.sum(1)).abs().sum().detach(), len(x))})

    def fail(self):
        raise ZeroDivisionError("deliberate")

class Killed(Fit):
    def loss(self, model, batch):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 5 and self.crash == os.environ.get("RANK"):
            os.kill(os.getpid(), 9)
        return Fit.loss(Fit(), model, batch)

class Bare(Fit):
    def loss(self, model, batch):
        return super().loss(model, batch).total

class Refusing(Fit):
    def after_step(self, run, result):
        raise lockstep.UserError("the task does not want to continue", "no such luck", "try again")

class Plain(nn.Module):
    pass
'''


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}


def python(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a Python that has torch already; it must succeed."""
    done = preloaded.run_python(*words, env=ENVIRONMENT, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done


def lockstep(*arguments: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a `lockstep` command that has torch already."""
    return preloaded.run(*arguments, env=ENVIRONMENT | env, cwd=folder)


def first_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return our first line: torch may warn on its own, about a machine without a name server, say."""
    return next(line for line in done.stderr.splitlines() if not re.match(r"\[.*\.cpp:\d+\]", line))


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "call", ["with lockstep.start(global_bach=8): pass", "lockstep.fit(lockstep.Task(), stepps=8)"]
)
def test_a_script_that_python_runs_ends_with_what_to_do_and_not_with_frames(tmp_path: Path, call: str) -> None:
    (tmp_path / "script.py").write_text(f"import lockstep\n{call}\n")
    done = preloaded.run_python("script.py", env=ENVIRONMENT, cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "script.py:2: " in first_line(done)
    assert re.search(r"\n  do:    set (global_batch|steps)=8$", done.stderr.strip())


def test_other_errors_of_a_script_and_hooks_of_its_own_stay(tmp_path: Path) -> None:
    other = (
        "import lockstep\nwith lockstep.start(global_batch=8, steps=1, run_dir='runs/one'): raise KeyError('mine')\n"
    )
    (tmp_path / "other.py").write_text(other)
    done = preloaded.run_python("other.py", env=ENVIRONMENT, cwd=tmp_path)
    assert "Traceback" in done.stderr
    assert "KeyError: 'mine'" in done.stderr

    hook = "import sys\nsys.excepthook = lambda kind, *_: print('my hook:', kind.__name__)\n"
    (tmp_path / "hooked.py").write_text(f"{hook}import lockstep\nwith lockstep.start(global_bach=8): pass\n")
    done = preloaded.run_python("hooked.py", env=ENVIRONMENT, cwd=tmp_path)
    assert done.stdout.strip().endswith("my hook: ConfigError")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """One run of the task on one process, and one on three, in the same folder."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "my_task.py").write_text(TASK)
    (folder / "wide.yaml").write_text("task: {width: 16}\nlr: {peak: 1e-2}\n")
    words = ("train", "my_task.py:Fit", "--config", "wide.yaml", "lr.warmup=3")
    done = lockstep(*words, "--nproc", "1", "run_dir=world-1", folder=folder)
    assert done.returncode == 0, done.stderr
    # In a fresh process, which has to find all it needs.
    command = [sys.executable, "-m", "lockstep", *words, "--nproc", "3", "run_dir=world-3"]
    subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, timeout=240, check=True)
    return folder


def test_three_processes_train_the_same_model_as_one(trained):
    """Dropout, ragged weights, clipping, short last windows: all at once."""
    assert_same_weights(trained / "world-1", trained / "world-3")


def test_a_run_leaves_everything_behind(trained):
    folder = trained / "world-3"
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    logs = {f"logs/rank-{rank}.log" for rank in range(3)}
    files = {"config.yaml", "config.sources.json", "plan.json", "metrics.jsonl", "events.jsonl"}
    step = "checkpoints/step-00000012"
    kept = {
        f"{step}/manifest.json",
        f"{step}/metrics.json",
        *(f"{step}/rank-0000{rank}.safetensors" for rank in range(3)),
    }
    kept |= {"checkpoints/latest", "checkpoints/owner", ".lock", ".launcher"}
    assert names == files | logs | kept | {"model.safetensors", "summary.json", "report.html"}

    sources = json.loads((folder / "config.sources.json").read_text())
    assert sources["lr.peak"] == "file wide.yaml"
    assert sources["lr.warmup"] == "command line"
    assert sources["global_batch"] == "task default"
    assert sources["seed"] == "default"
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in metrics] == [4, 8, 12]
    assert all("error" in record["metrics"] for record in metrics)
    events = [json.loads(line)["event"] for line in (folder / "events.jsonl").read_text().splitlines()]
    events = [event for event in events if event != "slow rank"]  # on a busy machine some rank may be
    assert events == ["start", "checkpoint", "eval", "end"]
    assert "<svg" in (folder / "report.html").read_text()
    assert all((folder / log).stat().st_size > 0 for log in logs)
    pids = re.search(
        r"^  pids +rank 0 (\d+), rank 1 (\d+), rank 2 (\d+)$", (folder / "logs/rank-0.log").read_text(), re.M
    )
    assert pids
    assert len(set(pids.groups())) == 3


def test_logged_losses_do_not_depend_on_the_world(trained):
    one, three = (
        [json.loads(line) for line in (trained / f"world-{n}" / "metrics.jsonl").read_text().splitlines()]
        for n in (1, 3)
    )
    for a, b in zip(one, three, strict=True):
        for key in ("loss", "grad_norm", "lr", "weight"):
            assert a[key] == pytest.approx(b[key], rel=1e-5), key
        assert a["metrics"]["error"] == pytest.approx(b["metrics"]["error"], rel=1e-5)


def test_fit_from_a_script_starts_its_own_workers(trained):
    """Without `if __name__ == "__main__"`, with a task that only the script knows."""
    script = TASK + (
        "\nresult = lockstep.fit(Fit, 'wide.yaml', nproc=2, run_dir='fitted', **{'lr.warmup': 3})\n"
        "print(result.summary['step'], result.run_dir, sum(p.numel() for p in result.model.parameters()))\n"
    )
    (trained / "script.py").write_text(script)
    done = python("script.py", folder=trained)
    assert done.stdout.splitlines()[-1] == f"12 fitted {4 * 16 + 16 + 16 + 1}"
    assert_same_weights(trained / "world-1", trained / "fitted")


def test_a_crash_on_one_rank_is_shown_first(trained):
    done = lockstep("train", "my_task.py:Fit", "task.crash='1'", "run_dir=crashed", "--nproc", "2", folder=trained)
    assert done.returncode == 1
    assert first_line(done).startswith("lockstep: rank 1 on ")
    assert "ZeroDivisionError: deliberate" in first_line(done)
    assert "in fail" in done.stderr  # the line of the user's own code
    assert "1 other rank ended because of it" in done.stderr


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_killed_rank_is_named(trained, rank):
    """Its peers see a closed connection within milliseconds, and say so: they must not get the blame."""
    arguments = (f"task.crash='{rank}'", f"run_dir=killed-{rank}", "--nproc", "2", "restart.per_hour=1")
    done = lockstep("train", "my_task.py:Killed", *arguments, folder=trained)
    assert done.returncode == 1
    assert first_line(done).startswith(f"lockstep: rank {rank} on ")
    assert "SIGKILL" in first_line(done)
    last = json.loads((trained / f"killed-{rank}" / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["type"]) == ("error", "SIGKILL")


def test_first_mistakes_get_an_answer(trained):
    """A file without its class, a class that is no task, a loss that is a bare tensor."""
    done = lockstep("train", "my_task.py", folder=trained)
    assert (done.returncode, "use my_task.py:" in done.stderr) == (2, True)
    done = lockstep("train", "my_task.py:Bare", "run_dir=bare", folder=trained)
    assert (done.returncode, "return lockstep.Loss(total, weight=" in done.stderr) == (2, True)
    done = lockstep("train", "my_task.py:Plain", folder=trained)
    assert (done.returncode, "the class Plain in my_task.py is not a task: it lacks model, data" in done.stderr) == (
        2,
        True,
    )


def test_an_error_is_shown_once_and_kept(trained):
    done = lockstep("train", "my_task.py:Refusing", "run_dir=refusing", folder=trained)
    assert done.returncode == 2
    assert done.stderr.count("no such luck") == 1
    assert "trainable" in done.stdout  # there was a screen that could have shown it
    assert "no such luck" not in done.stdout
    last = json.loads((trained / "refusing" / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["type"]) == ("error", "UserError")
    assert "no such luck" in last["message"]
    assert "no such luck" in (trained / "refusing" / "logs" / "rank-0.log").read_text()


class WithPreset(Task):
    defaults = {"preset": "large"}
    presets = {"small": {"task": {"width": 8}}, "large": {"task": {"width": 64}}}

    def __init__(self, width: int = 16):
        self.width = width


@pytest.mark.parametrize("settings", [{"preset": "small"}, {"task": {"width": 8}}, {"task.width": 8}])
def test_options_that_come_too_late_are_refused(settings):
    with pytest.raises(UserError, match=r"(?s)task\.width = 8 .* pass the class, lockstep\.fit\(WithPreset, \.\.\.\)"):
        fit(WithPreset(), settings, steps=1, global_batch=1)


@pytest.mark.parametrize("by_lockstep", [False, True])
def test_a_script_is_told_once_how_to_resume(monkeypatch, tmp_path, capsys, by_lockstep):
    """Under torchrun or alone the script says it; `lockstep train SCRIPT.py` says it itself."""
    (tmp_path / "checkpoints").mkdir()

    def preempted(*arguments):
        raise Preempted(3, "SIGINT", str(tmp_path))

    monkeypatch.setattr(api, "_fit_here", preempted)
    if by_lockstep:
        monkeypatch.setenv(api.LAYERS, "[]")
    with pytest.raises(Preempted):
        fit(WithPreset(), steps=4, global_batch=1)
    said = "" if by_lockstep else f'lockstep: to resume: lockstep.fit(..., run_dir="{tmp_path}", resume="auto")\n'
    assert capsys.readouterr().err == said


def test_a_run_that_could_not_save_says_so(monkeypatch, capsys):
    """Its exit code is that of a preemption, like that of a run which has saved."""

    def preempted(*arguments):
        raise Preempted(3, "SIGTERM", None, save_failed=True)

    monkeypatch.setattr(api, "_fit_here", preempted)
    with pytest.raises(Preempted):
        fit(WithPreset(), steps=4, global_batch=1)

    assert capsys.readouterr().err.startswith("lockstep: the save of step 3 failed: what was trained since")


def test_options_of_a_default_preset_are_not_recorded(monkeypatch):
    seen = []
    monkeypatch.setattr(api, "_fit_here", lambda task, resolved, name, _: seen.append((task.width, resolved)))
    fit(WithPreset(), steps=1, global_batch=1)
    fit(WithPreset, steps=1, global_batch=1)
    [(made, without), (asked, with_options)] = seen
    assert (made, without.config.task) == (16, {})
    assert (asked, with_options.config.task) == (64, {"width": 64})


def test_a_broken_environment_is_refused_with_a_hint(trained):
    done = lockstep("train", "my_task.py:Fit", folder=trained, RANK="first", WORLD_SIZE="2")
    assert done.returncode == 2
    assert "RANK" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def own_loops(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    script = str(ROOT / "examples" / "train_lockstep.py")
    python(script, folder=folder)
    next((folder / "runs").iterdir()).rename(folder / "world-1")
    done = lockstep("train", script, "--nproc", "2", "run_dir=world-2", folder=folder)
    assert done.returncode == 0, done.stderr
    python(*preloaded.TORCHRUN, "--standalone", "--nproc-per-node", "2", script, folder=folder)
    next((folder / "runs").iterdir()).rename(folder / "torchrun-2")
    return folder


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("other", ["world-2", "torchrun-2"])
def test_the_own_loop_gives_the_same_model_on_two_processes(own_loops, other):
    one, two = (losses(own_loops / name) for name in ("world-1", other))
    assert one[:3] == pytest.approx(two[:3], rel=1e-4)  # 90 steps; later, rounding has grown
    assert one == pytest.approx(two, rel=0.05, abs=0.01)


def test_the_own_loop_learns(own_loops):
    assert json.loads((own_loops / "world-2" / "summary.json").read_text())["eval_metrics"]["accuracy"] > 0.97


def test_the_two_examples_are_about_a_dozen_lines_apart():
    plain, ours = ((ROOT / "examples" / name).read_text() for name in ("train_torch.py", "train_lockstep.py"))
    loop = ours[ours.index("def main") : ours.index("def accuracy")].splitlines()
    new = [line for line in loop if line.strip() and line not in plain.splitlines()]
    assert len(new) <= 14


def test_the_plain_example_runs(tmp_path):
    done = python(str(ROOT / "examples" / "train_torch.py"), folder=tmp_path)
    assert float(done.stdout.split()[-1]) > 0.95


def test_the_package_names_its_version_and_no_unknown_names():
    import lockstep as package

    assert package.__version__ == _version.__version__
    assert (Path(package.__file__).parent / "py.typed").exists()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("kind", "rank", "words"),
    [
        (LauncherFailure.EXIT, 1, "rank 1 failed first"),
        (LauncherFailure.IMPORT, None, "they could not be started"),
        (LauncherFailure.SETUP, None, "they could not be started"),
        (LauncherFailure.ZYGOTE, None, "their launcher gave up"),
    ],
)
def test_a_failed_launcher_is_not_called_a_rank(tmp_path, kind, rank, words):
    ending = JobEnd(1, Failure.by_launcher(kind, "out of memory", rank))
    with pytest.raises(RanksFailed, match=words) as failed:
        api._raise_unless_done(ending, tmp_path, Bounds(2, 2), tmp_path)
    assert "rank None" not in str(failed.value)


BROKEN = """
import lockstep
import torch


class Broken(lockstep.Task):
    defaults = {"steps": 2, "global_batch": 4, "log": {"progress": "off"}}

    def model(self):
        return torch.nn.Linear(1, 1)

    def data(self):
        return torch.utils.data.TensorDataset(torch.ones(8, 1))

    def loss(self, model, batch):
        return lockstep.Loss(model(batch[0]).sum(), len(batch[0]))

    def after_step(self, run, result):
        raise ValueError("this step is broken")
"""
EARLY = """
raise ValueError("this file is broken")


class Broken:
    model = data = loss = optimizer = defaults = presets = unit = None
"""


def test_one_process_shows_the_users_frames_of_an_error(tmp_path):
    (tmp_path / "task.py").write_text(BROKEN)
    (tmp_path / "early.py").write_text(EARLY)
    done = preloaded.run("train", "task.py:Broken", "run_dir=run", env=ENVIRONMENT, cwd=tmp_path)
    head, place, code, *others, rest = done.stderr[done.stderr.index("Traceback") :].splitlines()
    assert done.returncode == 1
    assert head == "Traceback (most recent call last):"
    assert 'task.py", line 19, in after_step' in place
    assert code.strip() == 'raise ValueError("this step is broken")'
    assert "ValueError: this step is broken" in others
    assert not any(line.startswith('  File "') for line in others)
    assert re.fullmatch(r"\(without \d+ frames of Lockstep and of libraries: see events.jsonl\)", rest)

    # All frames, where the text says.
    (event,) = [
        json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines() if '"error"' in line
    ]
    assert "lockstep/api.py" in event["traceback"]

    # Before there is a run folder.
    done = preloaded.run("train", "early.py:Broken", env=ENVIRONMENT, cwd=tmp_path)
    assert done.stderr.count('  File "') == 1
    assert done.stderr.rstrip().endswith("frames of Lockstep and of libraries)")
