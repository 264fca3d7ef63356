"""The schedule of evaluations: every few steps or epochs, as all ranks know, or minutes, which only rank 0 measures."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from lockstep.config.sections import EvaluateConfig
from lockstep.errors import UserError


@dataclass
class EvaluationSchedule:
    """The steps after which evaluations are due."""

    config: EvaluateConfig
    steps_per_epoch: int | None  # None: a stream
    ahead: int = 0  # steps that the data is ahead of the run, as in `Plan`
    seconds: float = 0.0  # elapsed seconds of the run when it was last evaluated, or began

    def __post_init__(self) -> None:
        if self.config.epochs and self.steps_per_epoch is None:
            raise UserError(
                f"evaluate.epochs={self.config.epochs:g} counts epochs, and the data is a stream of unknown length",
                "",
                "set evaluate.every=100, which counts steps, or evaluate.minutes=10",
            )

    @property
    def is_on(self) -> bool:
        """True if there are evaluations during the run."""
        return any((self.config.every, self.config.epochs, self.config.minutes))

    def due_after(self, steps_done: int) -> bool:
        """Return whether the number of steps alone makes an evaluation due."""
        every, epochs = self.config.every, self.config.epochs
        if every and steps_done % every == 0:
            return True

        if not epochs or not self.steps_per_epoch:
            return False

        # Half an epoch may end within a step: the evaluation comes after the first step that reaches its end. As a
        # fraction, because 1.1 * 10 is more than 11 in floats, and step 11 would not reach it.
        period = Fraction(str(epochs)) * self.steps_per_epoch
        counted = steps_done + self.ahead
        return counted // period > (counted - 1) // period

    def due_by_clock(self, seconds: float) -> bool:
        """Return whether a run that has taken this many seconds should evaluate. Only rank 0's answer counts."""
        return self.config.minutes is not None and seconds - self.seconds >= 60 * self.config.minutes
