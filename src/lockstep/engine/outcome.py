"""The outcome of a step, which every rank reads from the same summed word; and what follows from it: for the loss
scale, for spikes to come, and for a run whose steps are not applied."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lockstep.config import RunConfig
from lockstep.engine.scale import LossScale
from lockstep.engine.skips import SkipPolicy, gradient_trouble, spike_trouble
from lockstep.engine.spikes import SpikeWatch
from lockstep.parallel.word import Word
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

    def good(self, word: Word, length: float, loss_limit: float) -> bool:
        """Whether the step may be applied."""
        return math.isfinite(length) and not (self.spikes.on and _mean_loss(word) > loss_limit)

    def settle(self, step: int, word: Word, gradient: Gradient, applied: bool) -> StepResult:
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

    def _result(self, step: int, word: Word, gradient: Gradient, applied: bool) -> StepResult:
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


def _mean_loss(word: Word) -> float:
    return float(word.loss) / float(word.weight) if word.weight else 0.0
