"""The outcome of a step, which every rank reads from the same summed control word, and what follows from it.

A step that must not be applied (its gradient is not finite, or its loss is a spike) is skipped and the reason reported;
then the run continues, rewinds to its last checkpoint, or stops. A step of weight 0 has nothing to learn from, which is
legal; many in a row are reported, and a run of nothing else is an error.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.config import NonfiniteConfig, RunConfig, SpikeConfig
from lockstep.errors import UserError
from lockstep.precision import LossScale
from lockstep.runtime.control_word import STEP_MODULUS, ControlWord
from lockstep.task import StepResult

MANY_EMPTY = 20  # steps of weight 0 in a row that are worth a warning
LEAST_LOSSES = 8  # losses seen before one can stand out as a spike
SPIKE = "a loss spike"  # how the reason of a skipped step begins


@dataclass(frozen=True)
class GradientStats:
    """Gradient statistics used to accept or skip the step."""

    grad_norm: float  # of the weighted mean's gradient
    norms: Tensor  # [len(names)]: of each parameter's own gradient
    names: list[str]
    loss_limit: float  # a mean loss above it is a spike


class Outcomes:
    """Decides whether a step is applied, and keeps what the decision depends on. The same on every rank."""

    def __init__(self, config: RunConfig, scale: LossScale, ranks: int):
        self.scale = scale
        self.ranks = ranks
        self.skips = SkipPolicy(config.nonfinite, config.spike)
        self.spikes = SpikeDetector(config.spike)

    def accept(self, word: ControlWord, grad_norm: float, loss_limit: float) -> bool:
        """Return whether the step may be applied."""
        return math.isfinite(grad_norm) and not (self.spikes.on and _mean_loss(word) > loss_limit)

    def settle(self, step: int, word: ControlWord, stats: GradientStats, applied: bool) -> StepResult:
        """Check that the ranks agree, count the step, and return its result."""
        if word.step != self.ranks * (step % STEP_MODULUS):
            raise RuntimeError(f"the ranks are out of step: their step numbers add up to {word.step}, here {step}")
        self.scale.check_equal(word.scale, self.ranks)
        result = self._result(step, word, stats, applied)

        # Weight 0: there was nothing to learn in this step, and nothing is wrong with it.
        if result.weight == 0:
            self.skips.empty(result)
            return result

        # A loss spike says nothing about the loss scale; an overflow does.
        before, scaler = self.scale.value, self.scale.scaler
        if scaler and (applied or not math.isfinite(stats.grad_norm)):
            scaler.update(overflowed=not applied)

        if applied:
            self.skips.applied()
            if self.spikes.on:
                self.spikes.add(_mean_loss(word))
        else:
            self.skips.skip(result, scale_lowered=self.scale.value < before)
        return result

    def _result(self, step: int, word: ControlWord, stats: GradientStats, applied: bool) -> StepResult:
        skip_reason = None
        if word.weight and not applied:
            if math.isfinite(stats.grad_norm):
                skip_reason = f"{SPIKE}: {_mean_loss(word):.4g}, above {stats.loss_limit:.4g}"
            else:
                skip_reason = _gradient_problem(stats.norms, stats.names)
        return StepResult(
            step=step,
            applied=applied,
            weight=float(word.weight),
            grad_norm=stats.grad_norm,
            stop=word.stop > 0,
            exhausted=word.exhausted == self.ranks,
            save=word.save > 0,
            preempt=word.preempt > 0,
            save_failed=word.save_failed > 0,
            skip_reason=skip_reason,
        )

    def state_dict(self) -> dict[str, Any]:
        scaler = self.scale.scaler
        return {
            "skips": self.skips.state_dict(),
            "spikes": self.spikes.state_dict(),
            "scaler": scaler.get_state() if scaler else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skips.load_state_dict(state["skips"])
        self.spikes.load_state_dict(state["spikes"])
        if self.scale.scaler and state["scaler"]:
            self.scale.scaler.load_state(state["scaler"])


class SkipPolicy:
    """Counts skipped steps and decides what follows. Every rank sees the same outcomes, so all decide alike."""

    def __init__(self, nonfinite: NonfiniteConfig, spike: SpikeConfig):
        self.nonfinite = nonfinite
        self.spike = spike
        self.skipped = 0
        self.failures_in_a_row = 0
        self.empty_in_a_row = 0  # steps of weight 0
        self.rewind_wanted: StepResult | None = None  # the step to rewind before, and to leave out
        self._lowered = 0  # skipped steps in which the loss scale of fp16 was only doing its work

        # Set by the run, which knows the samples: names those to blame, and logs.
        self.on_skip: Callable[[StepResult, str], str] = lambda result, reason: reason
        self.on_many_empty: Callable[[StepResult, str], None] = lambda result, reason: None

    def applied(self) -> None:
        self.failures_in_a_row = 0
        self.empty_in_a_row = 0

    def empty(self, result: StepResult) -> None:
        self.empty_in_a_row += 1
        if self.empty_in_a_row == MANY_EMPTY:
            reason = f"the loss of the last {MANY_EMPTY} steps has weight 0: nothing is learned from them"
            self.on_many_empty(result, reason)

    def skip(self, result: StepResult, scale_lowered: bool) -> None:
        """Count a skipped step. An overflow that lowers the loss scale of fp16 is the scaler at work, not a failure."""
        self.skipped += 1
        self.empty_in_a_row = 0
        assert result.skip_reason is not None
        reason = self.on_skip(result, result.skip_reason)
        if scale_lowered:
            self._lowered += 1
            return

        self.failures_in_a_row += 1
        if is_spike(result):
            key, policy = "spike", self.spike.policy
        else:
            key, policy = "nonfinite", self.nonfinite.policy
        if policy == "stop" or self.failures_in_a_row >= self.nonfinite.max_in_a_row:
            in_a_row = f"{self.failures_in_a_row} such step{'s' * (self.failures_in_a_row > 1)} in a row"
            raise UserError(
                f"step {result.step}: {reason} ({in_a_row}; {key}.policy={policy}, "
                f"nonfinite.max_in_a_row={self.nonfinite.max_in_a_row})",
                "",
                "lower lr.peak, set clip.norm, lengthen lr.warmup, or look at the samples of this step",
            )
        if policy == "rewind":
            self.rewind_wanted = result

    def check_something_learned(self, steps: int, applied: int) -> None:
        """Raise at the end if no step changed the weights: they must not look like the result of training."""
        if applied or not steps:
            return
        empty = steps - self.skipped
        if not self.skipped:
            found = "the loss of every step had weight 0"
            fix = "look at the weight that loss() returns (how many terms its sum has; 0 where all of them are masked)"
        elif self._lowered == self.skipped:
            found = f"{self.skipped} overflowed, and each of them halved the loss scale of fp16"
            fix = "train for more steps, or type a smaller scaler.initial"
        else:
            found = f"{self.skipped} were skipped for the reasons above"
            fix = "look at the samples that are named above, and at the loss of an untrained model"
        if self.skipped and empty:
            found += f"; {empty} had weight 0"
        raise UserError(
            f"none of the {steps} step{'s' * (steps != 1)} was applied: {found}",
            "",
            f"{fix}; the model is as it was before the first step, and model.safetensors is not written",
        )

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped, "failures_in_a_row": self.failures_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state["skipped"]
        self.failures_in_a_row = state["failures_in_a_row"]
        self.empty_in_a_row = 0


class SpikeDetector:
    """Finds steps whose loss stands out from the recent ones, from numbers that all ranks share."""

    def __init__(self, config: SpikeConfig):
        self.config = config
        self.on = config.policy != "off"
        self.recent: deque[float] = deque(maxlen=config.window)

    def limit(self) -> float:
        """Return the loss above which a step is a spike: the median, plus a multiple of the median deviation."""
        if not self.on or len(self.recent) < LEAST_LOSSES:
            return math.inf
        median = statistics.median(self.recent)
        deviation = statistics.median(abs(loss - median) for loss in self.recent)
        # A loss that hardly moves has no deviation to speak of; a hundredth of its size is never a spike.
        return median + self.config.factor * max(1.4826 * deviation, 0.01 * abs(median))

    def add(self, loss: float) -> None:
        if self.on and math.isfinite(loss):
            self.recent.append(loss)

    def state_dict(self) -> dict[str, list[float]]:
        return {"recent": list(self.recent)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.recent = deque(state["recent"], maxlen=self.config.window)


def is_spike(result: StepResult) -> bool:
    return (result.skip_reason or "").startswith(SPIKE)


def _gradient_problem(norms: Tensor, names: list[str]) -> str:
    bad = (~torch.isfinite(norms)).nonzero().flatten().tolist()
    if not bad:
        return "the gradient norm overflowed, though every parameter's own gradient is finite"
    return f"no finite gradient for {len(bad)} of {len(norms)} parameters, first {names[bad[0]]!r}"


def _mean_loss(word: ControlWord) -> float:
    return float(word.loss) / float(word.weight) if word.weight else 0.0
