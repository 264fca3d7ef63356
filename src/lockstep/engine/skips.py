"""What happens to a step that must not be applied (a gradient that is not finite, a loss spike): it is skipped and
the reason said; then the run goes on, goes back to its last checkpoint, or stops. A step of weight 0 has nothing to
learn from, which is legal; many in a row are told, and a run of nothing else is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.config import NonfiniteConfig, SpikeConfig
from lockstep.errors import UserError
from lockstep.task import StepResult

MANY = 20  # steps of weight 0 in a row: by then somebody should hear of it


class SkipPolicy:
    """Counts skipped steps. Every rank sees the same outcomes, so every rank does the same at the same step."""

    def __init__(self, nonfinite: NonfiniteConfig, spike: SpikeConfig):
        self.nonfinite, self.spike = nonfinite, spike
        self.skipped = 0
        self._lowered = 0  # of these, by the fp16 loss scale at work
        self.failures_in_a_row = 0
        self.empty_in_a_row = 0  # steps of weight 0
        self.rewind_wanted: StepResult | None = None  # the step to go back before, and to leave out
        self.on_skip: Callable[[StepResult, str], str] = lambda result, reason: reason
        self.on_many_empty: Callable[[StepResult, str], None] = lambda result, reason: None

    def applied(self) -> None:
        self.failures_in_a_row = self.empty_in_a_row = 0

    def empty(self, result: StepResult) -> None:
        self.empty_in_a_row += 1
        if self.empty_in_a_row == MANY:
            self.on_many_empty(result, f"the loss of the last {MANY} steps has weight 0: nothing is learned from them")

    def skip(self, result: StepResult, scale_lowered: bool) -> None:
        """An overflow that lowers the fp16 loss scale is the scaler at work, not a failure."""
        self.skipped += 1
        self.empty_in_a_row = 0
        assert result.trouble is not None
        reason = self.on_skip(result, result.trouble)
        if scale_lowered:
            self._lowered += 1
            return
        self.failures_in_a_row += 1
        key, policy = ("spike", self.spike.policy) if is_spike(result) else ("nonfinite", self.nonfinite.policy)
        if policy == "stop" or self.failures_in_a_row >= self.nonfinite.max_in_a_row:
            limit = f", nonfinite.max_in_a_row={self.nonfinite.max_in_a_row}"
            raise UserError(
                f"steps that can be applied ({key}.policy={policy}{limit})",
                f"step {result.step}: {reason}; {self.failures_in_a_row} such steps in a row",
                "lower lr.peak, set clip.norm, lengthen lr.warmup, or look at the samples of this step",
            )
        if policy == "rewind":
            self.rewind_wanted = result

    def check_something_learned(self, steps: int, applied: int) -> None:
        """At the end: weights that no step has changed must not look like the result of a training."""
        if applied or not steps:
            return
        asked, empty = f"a training of {steps} step{'s' * (steps != 1)}", steps - self.skipped
        if not self.skipped:
            found = "none was applied: the loss of every step had weight 0"
            fix = "look at the weight that loss() returns (how many terms its sum has; 0 where all of them are masked)"
        elif self._lowered == self.skipped:
            found = f"none was applied: {self.skipped} overflowed, and each of them halved the loss scale of fp16"
            fix = "train for more steps, or type a smaller scaler.initial"
        else:
            found = f"none was applied: {self.skipped} were skipped for the reasons above"
            fix = "look at the samples that are named above, and at the loss of an untrained model"
        if self.skipped and empty:
            found += f"; {empty} had weight 0"
        end = "the model is as it was before the first step, and model.safetensors is not written"
        raise UserError(asked, found, f"{fix}; {end}")

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped, "failures_in_a_row": self.failures_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped, self.failures_in_a_row = state["skipped"], state["failures_in_a_row"]
        self.empty_in_a_row = 0


SPIKE = "a loss spike"


def is_spike(result: StepResult) -> bool:
    return (result.trouble or "").startswith(SPIKE)


def spike_trouble(loss: float, limit: float) -> str:
    return f"{SPIKE}: {loss:.4g}, above {limit:.4g}"


def gradient_trouble(norms: Tensor, names: list[str]) -> str:
    """`norms` are the gradients' lengths, in the order of `names`."""
    bad = (~torch.isfinite(norms)).nonzero().flatten().tolist()
    if not bad:
        return "the gradient norm overflowed, though every parameter's own gradient is finite"
    return f"no finite gradient for {len(bad)} of {len(norms)} parameters, first {names[bad[0]]!r}"
