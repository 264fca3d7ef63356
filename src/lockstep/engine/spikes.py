"""Loss spikes: a step whose loss stands out from the recent ones. Judged from numbers that all ranks share."""

from __future__ import annotations

import math
import statistics
from collections import deque

from lockstep.config import SpikeConfig

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
