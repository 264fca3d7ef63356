"""Two tasks that look healthy. Lab 7 plants faults in the first; the second has a mistake that no screen shows.

The faults come from a seed: which of them, on which rank, at which step. `lockstep.lab.patient.faults` knows the truth.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.lab.patient.faults import PlantedFault, plan, silent_mistake
from lockstep.task import Loss, RunView, StepResult, Task


def make_net() -> nn.Sequential:
    """Return a small classifier."""
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def make_data() -> TensorDataset:
    """Return 256 points in 6 dimensions, in four classes."""
    x = torch.randn(256, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :4].argmax(1))


class Patient(Task):
    """A task that something happens to, once each: `marks` is a folder in which the faults that were are noted."""

    defaults = {"steps": 20, "global_batch": 16, "micro_batch": 8, "checkpoint": {"every": 1}, "log": {"every": 5}}

    def __init__(self, *, seed: int = 0, marks: str = ""):
        self.faults = plan(seed) if marks else []
        self.marks = Path(marks)
        self.step = 0

    def model(self) -> nn.Module:
        """Return the model."""
        return make_net()

    def data(self) -> TensorDataset:
        """Return the samples."""
        return make_data()

    def after_step(self, run: RunView, result: StepResult | None) -> None:
        """Keep count of the steps, for the faults."""
        self.step = run.steps_done

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this task."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what a checkpoint holds of this task."""
        self.step = state["step"]

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        """Return the loss of a micro-batch. On the way, the fault of this rank and step happens, if there is one."""
        x, y = batch
        match self._fault():
            case "exception":
                x = self._normalise(x)
            case "hang":
                self._wait_for_table()
            case "killed":
                self._allocate()
            case "exit":
                self._check_quota()

        return Loss(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))

    def _normalise(self, x: Tensor) -> Tensor:
        scale = x.std(dim=0)
        return x / scale[:, None]

    def _wait_for_table(self) -> None:
        table = self.marks / "table"
        while not table.exists():
            time.sleep(0.05)

    def _allocate(self) -> None:
        # What the kernel does to a process when memory is short.
        os.kill(os.getpid(), signal.SIGKILL)

    def _check_quota(self) -> None:
        free_hours = 0
        if free_hours < 1:
            sys.exit(0)

    def _fault(self) -> str | None:
        """Return the fault of this rank and step, if it has not happened yet."""
        for fault in self.faults:
            if self.step == fault.step and int(os.environ.get("RANK", "0")) == fault.rank and self._note(fault):
                return fault.cause

        return None

    def _note(self, fault: PlantedFault) -> bool:
        """Note that a fault happens; return whether it is the first time."""
        try:
            (self.marks / fault.cause).touch(exist_ok=False)
        except FileExistsError:
            return False

        return True


class Silent(Task):
    """A task that trains without a word of complaint, and not the same model on two processes as on one."""

    defaults = {"steps": 20, "global_batch": 16, "micro_batch": 4, "lr": {"peak": 0.01}}

    def __init__(self, *, seed: int = 0):
        self.mistake = silent_mistake(seed)
        self.net = make_net()

    def model(self) -> nn.Module:
        """Return the model."""
        return self.net

    def data(self) -> TensorDataset:
        """Return the samples."""
        return make_data()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        """Return the loss of a micro-batch."""
        x, y = batch
        logits = self.net(x) if self.mistake == "bypass" else model(x)
        total = F.cross_entropy(logits, y, reduction="sum")
        if self.mistake == "rank-in-loss":
            total = total / int(os.environ.get("WORLD_SIZE", "1"))
        return Loss(total, weight=len(y))

    def after_step(self, run: RunView, result: StepResult | None) -> None:
        """Keep the last bias small."""
        if self.mistake == "not-synchronised" and os.environ.get("RANK", "0") == "0":
            with torch.no_grad():
                self.net.get_parameter("2.bias").mul_(0.9)
