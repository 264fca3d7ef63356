"""`lockstep runs` and `lockstep rm` on real runs: running, finished, preempted, failed, killed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

import preloaded

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
START_S = 120.0  # a limit that only a hang reaches

TASK = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from lockstep import Loss, Task

class Slow(Task):
    defaults = {"steps": 10_000, "global_batch": 4, "log.every": 1, "log.progress": "off", "lr.peak": 0.0}

    def __init__(self, *, fails: bool = False):
        self.fails = fails

    def model(self):
        return nn.Linear(1, 1)

    def data(self):
        return TensorDataset(torch.arange(64.0)[:, None])

    def loss(self, model, batch):
        if self.fails and model.training:
            raise ValueError("on purpose")
        time.sleep(0.01)
        return Loss(model(batch[0]).sum(), weight=len(batch[0]))
"""


def states(folder: Path) -> dict[str, str]:
    done = preloaded.run("runs", "--json", env=ENVIRONMENT, cwd=folder)
    return {Path(run["path"]).name: run["state"] for run in json.loads(done.stdout)}


def begun(run: Path) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


@pytest.mark.long
@pytest.mark.parametrize("nproc", [(), ("--nproc", "2")], ids=["alone", "two"])
def test_every_state_of_a_real_run(tmp_path, nproc):
    (tmp_path / "slow.py").write_text(TASK)

    def train(name: str, *words: str) -> list[str]:
        return ["train", "slow.py:Slow", f"run_dir=runs/{name}", *nproc, *words]

    for name, words, code in (("finished", ["steps=2"], 0), ("failed", ["task.fails=true"], 1)):
        assert preloaded.run(*train(name, *words), env=ENVIRONMENT, cwd=tmp_path).returncode == code
    with (tmp_path / "out").open("wb") as out:
        running = {
            name: preloaded.start(*train(name), env=ENVIRONMENT, cwd=tmp_path, stdout=out, stderr=out)
            for name in ("preempted", "killed")
        }
        deadline = time.monotonic() + START_S
        while not all(begun(tmp_path / "runs" / name) for name in running):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    # Nothing that is running is deleted, and nothing that is named beside it.
    expected = {"finished": "finished", "failed": "failed", "preempted": "running", "killed": "running"}
    assert states(tmp_path) == expected
    refused = preloaded.run("rm", "runs/finished", "runs/killed", "--yes", env=ENVIRONMENT, cwd=tmp_path)
    assert refused.returncode == 2
    assert "runs/killed is running" in refused.stderr
    assert states(tmp_path) == expected

    running["preempted"].send_signal(signal.SIGTERM)
    running["killed"].send_signal(signal.SIGKILL)
    for process in running.values():
        process.wait(START_S)
    deadline = time.monotonic() + START_S
    while states(tmp_path) != {name: name for name in expected}:  # ranks end a moment after their launcher
        assert time.monotonic() < deadline, states(tmp_path)

    done = preloaded.run("rm", *(f"runs/{name}" for name in expected), "--yes", env=ENVIRONMENT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "runs").iterdir()) == []


OTHER = """
from slow import Slow
from torch import nn

class Other(Slow):
    def model(self):
        return nn.Linear(2, 1)
"""


def records(run: Path) -> dict[str, bytes]:
    """What a run has left: everything but the locks, the owner of the checkpoints, and what ranks have printed."""
    left_out = (".lock", ".launcher", "owner")
    found = {path for path in run.rglob("*") if path.is_file() and path.name not in left_out}
    return {str(path.relative_to(run)): path.read_bytes() for path in found if path.parent.name != "logs"}


@pytest.mark.parametrize("nproc", [(), ("--nproc", "2")], ids=["alone", "two"])
def test_a_refused_resume_leaves_a_run_as_it_was(tmp_path, nproc):
    (tmp_path / "slow.py").write_text(TASK)
    (tmp_path / "other.py").write_text(OTHER)

    def train(target: str, *words: str) -> int:
        return preloaded.run("train", target, *nproc, *words, env=ENVIRONMENT, cwd=tmp_path).returncode

    resume = ("--resume", "runs/done")
    assert train("slow.py:Slow", "run_dir=runs/done", "steps=2") == 0
    before = records(tmp_path / "runs" / "done")
    for target, words in (
        ("slow.py:Slow", ("seed=7", *resume)),
        ("other.py:Other", resume),
        ("slow.py:Slow", ("steps=1", *resume)),
        ("slow.py:Slow", ("run_dir=runs/done",)),
    ):
        assert train(target, *words) == 2, words
        assert records(tmp_path / "runs" / "done") == before, words
        assert states(tmp_path) == {"done": "finished"}

    # A resumed run that has begun, and fails, has failed.
    assert train("slow.py:Slow", "task.fails=true", "steps=4", *resume) == 1
    assert states(tmp_path) == {"done": "failed"}
