"""The run as the check sees it: its data, its model and its loss, and nothing of its loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.config import RunConfig
from lockstep.parallel.driver import Driver
from lockstep.precision import Precision
from lockstep.runtime.context import EventLogger, Runtime
from lockstep.task import BatchSource


@dataclass(frozen=True)
class CheckedRun:
    config: RunConfig
    runtime: Runtime
    driver: Driver
    precision: Precision
    source: BatchSource
    micro_batch_size: int
    optimizers: Sequence[torch.optim.Optimizer]
    log_event: EventLogger

    prepares_batches: bool  # the task has a `before_batch`, which prepares for a whole micro-batch
    around_loss: Callable[[Any], Any]  # adds the hooks to the task's loss
    whole_batches: Callable[[], AbstractContextManager[None]]  # `run.all_gather` gathers nothing inside

    def note(self, reason: str) -> None:
        """Log why the loss is not checked."""
        self.log_event("note", reason=f"the loss is not checked before the first step: {reason}")

    def warn(self, reason: str) -> None:
        """Log what trains well and is still a mistake."""
        self.log_event("warning", reason=reason)
