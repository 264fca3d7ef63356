"""What happens when a gradient is not finite: skip the step, say why, and stop before a run trains on nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.config import NonfiniteConfig
from lockstep.errors import UserError
from lockstep.task import StepResult


class SkipPolicy:
    """Counts skipped steps. Every rank sees the same outcomes, so every rank stops at the same step."""

    def __init__(self, config: NonfiniteConfig):
        self.config = config
        self.skipped = 0
        self.failures_in_a_row = 0
        self.on_skip: Callable[[StepResult, str], None] = lambda result, reason: None

    def applied(self) -> None:
        self.failures_in_a_row = 0

    def skip(self, result: StepResult, norms: Tensor, names: list[str], scale_lowered: bool) -> None:
        """`norms` are the gradients' lengths, in the order of `names`.

        An overflow that lowers the fp16 loss scale is the scaler at work, not a failure.
        """
        self.skipped += 1
        reason = _name_bad(norms, names)
        self.on_skip(result, reason)
        if scale_lowered:
            return
        self.failures_in_a_row += 1
        if self.config.policy == "stop" or self.failures_in_a_row >= self.config.max_in_a_row:
            raise UserError(
                f"finite gradients (nonfinite.policy={self.config.policy}, max_in_a_row={self.config.max_in_a_row})",
                f"step {result.step}: {reason}; {self.failures_in_a_row} such steps in a row",
                "lower lr.peak, set clip.norm, lengthen lr.warmup, or look at the samples of this step",
            )


def _name_bad(norms: Tensor, names: list[str]) -> str:
    bad = (~torch.isfinite(norms)).nonzero().flatten().tolist()
    if not bad:
        return "the gradient norm overflowed, though every parameter's own gradient is finite"
    return f"no finite gradient for {len(bad)} of {len(norms)} parameters, first {names[bad[0]]!r}"
