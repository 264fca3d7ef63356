"""A model or a first batch that never comes: signals end such a process at once, and no worker process stays."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from faults.runs import Started
from lockstep.data.worker_process import WORKER_GRACE_S

# After that, worker processes would end by themselves.
PATIENCE_S = 0.75 * WORKER_GRACE_S

STUCK = """
import pathlib, time
import torch
from torch import nn
import lockstep

class Stuck(lockstep.Task):
    defaults = {"steps": 4, "global_batch": 4, "device": "cpu"}

    def __init__(self, where: str = "batch"):
        self.where = where

    def wait(self):
        pathlib.Path("waiting").touch()
        time.sleep(3600)

    def model(self):
        if self.where == "model":
            self.wait()
        return nn.Linear(1, 1)

    def data(self):
        return Samples(self)

    def loss(self, model, batch):
        if self.where == "step":
            self.wait()
        return lockstep.Loss(model(batch).square().sum(), len(batch))


class Samples(torch.utils.data.Dataset):
    def __init__(self, task):
        self.task = task

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.task.where == "batch":
            self.task.wait()
        return torch.ones(1)
"""


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGTERM, ("task.where=model",)),
        (signal.SIGUSR1, ("task.where=batch",)),
        (signal.SIGINT, ("task.where=batch", "data.workers=2")),
        (signal.SIGTERM, ("task.where=batch", "data.workers=2", "checks.loss=off", "checks.first_batch=false")),
    ],
)
def test_a_process_without_a_launcher_does_not_wait_for_its_first_step(
    tmp_path: Path, number: signal.Signals, words: tuple[str, ...]
) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    started = Started(tmp_path, *words, target="stuck.py:Stuck", nproc=None)
    started.wait_until((tmp_path / "waiting").exists)
    loaders = psutil.Process(started.process.pid).children(recursive=True)
    started.send(number)
    stopped = started.end(PATIENCE_S)
    assert stopped.code == (130 if number == signal.SIGINT else 75), stopped.output
    assert f"{number.name} came before the first step" in stopped.output
    assert not psutil.wait_procs(loaders, timeout=PATIENCE_S)[1]


def test_loader_processes_do_not_outlive_launcher_and_ranks(tmp_path: Path) -> None:
    """The process that starts the ranks would kill them, and it is killed too."""
    (tmp_path / "stuck.py").write_text(STUCK)
    started = Started(tmp_path, "task.where=batch", "data.workers=2", target="stuck.py:Stuck", nproc=1)
    started.wait_until((tmp_path / "waiting").exists)
    launcher = psutil.Process(started.process.pid)
    starters = launcher.children()
    (rank,) = [rank for starter in starters for rank in starter.children()]
    started.wait_until(lambda: len(rank.children()) == 2)
    loaders = rank.children()

    # Stopped first, so that none of them acts when another is gone.
    for process in (launcher, *starters):
        process.suspend()
    try:
        for process in (*starters, launcher):
            process.kill()
        assert not psutil.wait_procs([rank, *loaders], timeout=PATIENCE_S)[1]
    finally:
        for process in loaders:
            with suppress(psutil.NoSuchProcess):
                process.kill()


FAILS = """
import os, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from lockstep import Loss, Task

class Fails(Task):
    defaults = {"steps": 20, "global_batch": 4, "device": "cpu", "compile": False}
    losses = 0

    def model(self):
        return nn.Linear(1, 1)

    def data(self):
        return TensorDataset(torch.arange(64.0)[:, None])

    def loss(self, model, batch):
        self.losses += 1
        if self.losses == 16 and os.environ["RANK"] == "1":
            # A driver that waits for a peer, say.
            torch.distributed.destroy_process_group = lambda: time.sleep(3600)
            raise ValueError("the cause")
        return Loss(model(batch[0]).square().sum(), len(batch[0]))
"""


def test_a_rank_that_fails_and_hangs_while_it_cleans_up_has_failed(tmp_path: Path) -> None:
    """It was called a hang, and the job was restarted."""
    (tmp_path / "fails.py").write_text(FAILS)
    ended = Started(tmp_path, target="fails.py:Fails").end(seconds=120.0)
    assert ended.code == 1, ended.output
    assert "ValueError: the cause" in ended.output
    assert "not restarted: no checkpoint has been saved since the last start" in ended.output
    (failure,) = ended.events("failure")
    assert (failure["rank"], failure["kind"]) == (1, "ValueError")
