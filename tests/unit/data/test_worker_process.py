"""Worker processes that a preemption finds while they are being started."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.process import BaseProcess

import pytest
from torch.utils.data import DataLoader

from lockstep.data.worker_process import LoaderBatches
from lockstep.errors import Preempted


def test_a_signal_between_the_start_of_two_workers_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one ignores what Python sends it at exit, and Python would wait for it: two minutes."""
    before = multiprocessing.active_children()
    started: list[BaseProcess] = []
    start = BaseProcess.start

    def start_one(process: BaseProcess) -> None:
        if started:
            raise Preempted(0, "SIGINT", None)
        start(process)
        started.append(process)

    monkeypatch.setattr(BaseProcess, "start", start_one)
    with pytest.raises(Preempted):
        LoaderBatches(DataLoader([1, 2, 3, 4], num_workers=2))
    started[0].join(60)
    assert started[0].exitcode == -signal.SIGKILL
    assert multiprocessing.active_children() == before
