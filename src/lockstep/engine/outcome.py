"""The outcome of a step, which every rank reads from the same summed word; and what follows from it: for the loss
scale, for spikes to come, and for a run whose steps are not applied."""

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
from lockstep.runtime.control_word import ControlWord
from lockstep.task import StepResult

STEP_MODULUS = 4096  # step numbers are compared modulo this, so that float32 carries them exactly


@dataclass(frozen=True)
class Gradient:
    """What is judged of a step besides its word."""

    length: float  # of the weighted mean's gradient
    norms: Tensor  # of the parameters' own gradients
    used: list[str]  # those parameters
    loss_limit: float  # above it, the loss is a spike


class Outcomes:
    def __init__(self, config: RunConfig, scale: LossScale, ranks: int):
        self.scale, self.ranks = scale, ranks
        self.skips = SkipPolicy(config.nonfinite, config.spike)
        self.spikes = SpikeWatch(config.spike)

    def good(self, word: ControlWord, length: float, loss_limit: float) -> bool:
        """Whether the step may be applied."""
        return math.isfinite(length) and not (self.spikes.on and _mean_loss(word) > loss_limit)

    def settle(self, step: int, word: ControlWord, gradient: Gradient, applied: bool) -> StepResult:
        if word.step != self.ranks * (step % STEP_MODULUS):
            raise RuntimeError(f"the ranks have fallen out of step: their step numbers add up to {word.step}")
        self.scale.check_equal(word.scale, self.ranks)
        result = self._result(step, word, gradient, applied)
        if result.weight == 0:  # nothing to learn in this step, and nothing wrong with it
            self.skips.empty(result)
            return result
        before, scaler = self.scale.value, self.scale.scaler
        if scaler and (applied or not math.isfinite(gradient.length)):  # a loss spike says nothing about the scale
            scaler.update(overflowed=not applied)
        if applied:
            self.skips.applied()
            if self.spikes.on:
                self.spikes.add(_mean_loss(word))
        else:
            self.skips.skip(result, scale_lowered=self.scale.value < before)
        return result

    def _result(self, step: int, word: ControlWord, gradient: Gradient, applied: bool) -> StepResult:
        trouble = None
        if word.weight and not applied:
            if math.isfinite(gradient.length):
                trouble = spike_trouble(_mean_loss(word), gradient.loss_limit)
            else:
                trouble = gradient_trouble(gradient.norms, gradient.used)
        return StepResult(
            step=step,
            applied=applied,
            weight=float(word.weight),
            grad_norm=gradient.length,
            stop=word.stop > 0,
            exhausted=word.exhausted == self.ranks,
            save=word.save > 0,
            leave=word.leave > 0,
            save_failed=word.save_failed > 0,
            trouble=trouble,
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


def _mean_loss(word: ControlWord) -> float:
    return float(word.loss) / float(word.weight) if word.weight else 0.0


# What happens to a step that must not be applied (a gradient that is not finite, a loss spike): it is skipped and
# the reason said; then the run goes on, goes back to its last checkpoint, or stops. A step of weight 0 has nothing
# to learn from, which is legal; many in a row are told, and a run of nothing else is an error.


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


# Loss spikes: a step whose loss stands out from the recent ones. Judged from numbers that all ranks share.


LEAST = 8  # losses seen before anything can stand out


class SpikeWatch:
    def __init__(self, config: SpikeConfig):
        self.config = config
        self.on = config.policy != "off"
        self.recent: deque[float] = deque(maxlen=config.window)

    def limit(self) -> float:
        """A loss above this is a spike: the median, plus so many times the median distance from it."""
        if not self.on or len(self.recent) < LEAST:
            return math.inf
        middle = statistics.median(self.recent)
        spread = statistics.median(abs(loss - middle) for loss in self.recent)
        # A loss that hardly moves has no spread to speak of; a hundredth of its size always is no spike.
        return middle + self.config.factor * max(1.4826 * spread, 0.01 * abs(middle))

    def add(self, loss: float) -> None:
        if self.on and math.isfinite(loss):
            self.recent.append(loss)

    def state_dict(self) -> dict[str, list[float]]:
        return {"recent": list(self.recent)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.recent = deque(state["recent"], maxlen=self.config.window)
