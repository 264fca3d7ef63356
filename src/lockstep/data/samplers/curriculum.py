"""Easy samples first.

In the first epochs only a growing share of the samples is drawn, the easiest ones. After that every epoch is an
ordinary shuffled one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.data.samplers.sampler import SeededSampler, as_numbers, uniforms
from lockstep.data.samplers.shuffled import ShuffledSampler
from lockstep.errors import UserError


@dataclass(eq=False)
class CurriculumSampler(SeededSampler):
    """Draws from the easiest samples, more and more of them, until all are in use.

    In the first `ramp` epochs each offset draws one of the easiest samples, with replacement: `start` is the share of
    the dataset at the beginning, and it grows to 1 with the position. From then on every sample occurs once per epoch,
    shuffled. An epoch has as many offsets as there are samples.
    """

    difficulty: Any  # (samples,) any numbers, such as lengths; samples of equal difficulty keep their order
    ramp: float = 1.0  # epochs until all samples are in use; it may be a fraction
    start: float = 0.1  # share of the samples at the beginning
    schedule: Callable[[float], float] | None = None  # progress of the ramp, 0 to 1 -> share; None: linear
    seed: int | None = None  # None: the run's

    def __post_init__(self) -> None:
        if not (0 < self.start <= 1 and self.ramp > 0):
            raise UserError(
                f"a curriculum cannot start with a share of {self.start} and take {self.ramp} epochs",
                "",
                "set start above 0 and at most 1, and ramp above 0",
            )

        difficulty = as_numbers(self.difficulty, "difficulty", minimum=-np.inf)
        self._easiest_first = np.argsort(difficulty, kind="stable")
        self._shuffled = ShuffledSampler(len(difficulty), self.seed or 0)

    def __len__(self) -> int:
        return len(self._easiest_first)

    @property
    def dataset_length(self) -> int:
        return len(self._easiest_first)

    def ids(self, epoch: int, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= len(self)
        key = self.key("curriculum", epoch)
        if epoch >= self.ramp:
            return self._shuffled.ids(epoch, start, stop)

        # Each offset may draw from the easiest samples, up to its own share.
        shares = np.array([self.share(epoch + offset / len(self)) for offset in range(start, stop)])
        allowed = np.maximum(1, np.ceil(shares * len(self)))
        return self._easiest_first[(uniforms(key, start, stop) * allowed).astype(np.int64)]

    def share(self, epochs: float) -> float:
        """Return the share of the samples that are in use after this many epochs, a fraction included."""
        progress = min(1.0, epochs / self.ramp)
        if self.schedule is None:
            return self.start + (1 - self.start) * progress

        share = self.schedule(progress)
        if not 0 < share <= 1:
            raise UserError(
                f"the schedule of a curriculum must return a share above 0 and at most 1; it returned {share}",
                f"its argument was {progress:g}, the progress of the ramp",
                "return 1.0 for all samples",
            )

        return share
