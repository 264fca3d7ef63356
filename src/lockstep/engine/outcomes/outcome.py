"""The outcome of a pass, which is that of its step if the step has one: whether it is applied.

Every rank reads it from the same summed control word.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lockstep.engine.passes import StepStatus
from lockstep.parallel.driver import Reduced
from lockstep.parallel.progress import PassProgress
from lockstep.runtime.control_word import SummedWord


@dataclass(frozen=True, slots=True)
class Outcome:
    """A reduced pass and the numbers that decide whether it is applied. They are the same on every rank."""

    status: StepStatus  # of the step that the pass belongs to
    progress: PassProgress
    reduced: Reduced
    loss_limit: float  # a mean loss above this is a spike
    word: SummedWord
    grad_norm: float  # of the gradient of the mean loss; any number if the weight is 0
    applied_by_device: bool | None = None  # whether the device has applied it; None: the host decides now

    @property
    def finite(self) -> bool:
        """Whether the norm of the gradient is finite."""
        return math.isfinite(self.grad_norm)

    @property
    def mean_loss(self) -> float:
        """The mean loss of the pass; 0 if the control word does not include the loss."""
        return self.word.loss / self.word.weight if self.word.weight else 0.0

    @property
    def applied(self) -> bool:
        """Whether the pass is applied."""
        if self.applied_by_device is not None:
            return self.applied_by_device

        # `not >` instead of `<=`: a mean loss of nan is not a spike. Only the gradient decides then, as on the device.
        # A negative weight, which `OutcomeHandler.check` refuses, would turn the descent into an ascent.
        return self.finite and self.word.weight > 0 and not (self.mean_loss > self.loss_limit)

    def skip_reason(self) -> str | None:
        """Return why the pass is skipped, or None if it is applied or has weight 0, which is legal."""
        if self.applied or not self.word.weight:
            return None

        if self.finite:
            return f"a loss spike: {self.mean_loss:.4g}, above {self.loss_limit:.4g}"

        if not math.isfinite(self.word.weight):
            return "the weight of the loss is not finite"

        # The host waits for the norms here. Skipped steps are rare, so this is acceptable.
        nonfinite = (~torch.isfinite(self.reduced.norms)).nonzero().flatten().tolist()
        if not nonfinite:
            return "the gradient norm overflowed, though every parameter's own gradient is finite"

        names = self.reduced.names
        return f"no finite gradient for {len(nonfinite)} of {len(names)} parameters, first {names[nonfinite[0]]!r}"
