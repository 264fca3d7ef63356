"""Training in a thread that is not Python's main thread, where signals cannot be handled."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.runtime.preemption import handle_signals


class Line(lockstep.Task):
    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def data(self) -> Any:
        return TensorDataset(torch.ones(8, 2))

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        return lockstep.Loss(model(batch[0]).square().sum(), weight=len(batch[0]))


def test_fit_in_another_thread(tmp_path: Path) -> None:
    def train() -> int:
        assert threading.current_thread() is not threading.main_thread()
        values: dict[str, Any] = {"steps": 2, "global_batch": 4, "device": "cpu", "log": {"progress": "off"}}
        return lockstep.fit(Line(), run_dir=str(tmp_path), **values).summary["applied"]

    # As in a process that has had no worker processes.
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(train).result() == 2
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_handler_that_was_taken_away_comes_back() -> None:
    def handler(number: int, frame: Any) -> None: ...

    before = signal.signal(signal.SIGCHLD, handler)
    try:
        with handle_signals():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        assert signal.getsignal(signal.SIGCHLD) is handler
    finally:
        signal.signal(signal.SIGCHLD, before)
