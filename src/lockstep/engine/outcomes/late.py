"""Outcomes that are *late*: the device decides whether a step is applied, and the host reads that one step later.

So the host never waits for the device. Where it decides itself, no outcome is late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.engine.outcomes.outcome import Outcome
from lockstep.engine.passes import StepStatus
from lockstep.parallel.driver import Reduced
from lockstep.parallel.progress import PassProgress


def not_applied_on_device(reduced: Reduced, grad_norm: Tensor, weight: Tensor, loss_limit: float) -> Tensor:
    """Return whether the step must not be applied, as a tensor () on the device: the rule of `Outcome.applied`.

    `weight` () is that of the summed control word.
    """
    # Where the weight is positive, a norm is at least 0, inf or nan. torch.isfinite would launch three more kernels.
    not_applied = ~((weight > 0) & (grad_norm < math.inf))

    # Without a limit, the control word is not decoded, which would launch kernels.
    if loss_limit == math.inf:
        return not_applied

    return not_applied | (reduced.codec.mean_loss(reduced.packed_word) > loss_limit)


@dataclass(frozen=True)
class LateOutcome:
    """The numbers of an outcome on their way to the host, and what the host knows already. It is read once."""

    status: StepStatus
    progress: PassProgress
    reduced: Reduced
    optimizer_indices: Sequence[int]  # of the optimizers that the update was for
    loss_limit: float
    row: Tensor  # [2 + LENGTH]: whether it was not applied, gradient norm, packed control word; in pinned host memory
    arrived: torch.cuda.Event

    @classmethod
    def queue_copy(
        cls,
        status: StepStatus,
        progress: PassProgress,
        reduced: Reduced,
        optimizer_indices: Sequence[int],
        loss_limit: float,
        not_applied: Tensor,
        grad_norm: Tensor,
    ) -> LateOutcome:
        """Queue the copy of the numbers to the host, after the kernels of the step. The event tells when it is done."""
        numbers = [not_applied.double().reshape(1), grad_norm.reshape(1), reduced.packed_word.double()]
        row = torch.cat(numbers).to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(status, progress, reduced, optimizer_indices, loss_limit, row, arrived)

    @property
    def share(self) -> float:
        """The share of its step: 1, unless several passes of the step ended with an update."""
        return 1 / self.status.updates

    def read(self) -> Outcome:
        """Wait for the device, and return what it has decided."""
        self.arrived.synchronize()
        not_applied, grad_norm, *values = self.row.tolist()
        word = self.reduced.codec.unpack(values)
        return Outcome(
            self.status,
            self.progress,
            self.reduced,
            self.loss_limit,
            word,
            grad_norm,
            applied_by_device=not not_applied,
        )
