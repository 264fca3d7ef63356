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

from lockstep.lab.patient.faults import plan, silent_mistake
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
        # Without a folder to remember them in, each fault would return after every restart, and no run would end.
        self.faults = plan(seed) if marks else []
        self.marks = Path(marks)
        self.step = 0

    def model(self) -> nn.Module:
        return make_net()

    def data(self) -> TensorDataset:
        return make_data()

    # `loss` does not know its step, so the task counts. A restarted run must not begin at 0 again, which
    # is why the count is saved.

    def after_step(self, run: RunView, result: StepResult | None) -> None:
        self.step = run.steps_done

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
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

    # These have innocent names, as in a real program. What goes wrong in each is for the learner to find.

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
        rank = int(os.environ.get("RANK", "0"))
        for fault in self.faults:
            # Noted before it happens: afterwards this process is gone, and the next one repeats the step.
            mark = self.marks / fault.cause
            if (fault.step, fault.rank) == (self.step, rank) and not mark.exists():
                mark.touch()
                return fault.cause

        return None


class Silent(Task):
    """A task that trains without a word of complaint, and not the same model on two processes as on one."""

    defaults = {"steps": 20, "global_batch": 16, "micro_batch": 4, "lr": {"peak": 0.01}}

    def __init__(self, *, seed: int = 0):
        # The task keeps the model, which is what makes one of the mistakes possible.
        self.mistake = silent_mistake(seed)
        self.net = make_net()

    def model(self) -> nn.Module:
        return self.net

    def data(self) -> TensorDataset:
        return make_data()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch

        # `weight` already makes it a mean over the samples of all ranks: divided once more, the loss is too small.
        total = F.cross_entropy(model(x), y, reduction="sum")
        if self.mistake == "rank-in-loss":
            total = total / int(os.environ.get("WORLD_SIZE", "1"))
        return Loss(total, weight=len(y))

    def after_step(self, run: RunView, result: StepResult | None) -> None:
        """Keep the last bias small."""
        # A step on rank 0 alone: the replicas drift apart, and nothing compares them unless it is asked to.
        if self.mistake == "not-synchronised" and os.environ.get("RANK", "0") == "0":
            with torch.no_grad():
                self.net.get_parameter("2.bias").mul_(0.9)
