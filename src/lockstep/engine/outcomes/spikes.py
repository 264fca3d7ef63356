"""Loss spikes: losses far above the recent ones."""

from __future__ import annotations

import math
import statistics
from collections import deque

from lockstep.config import SpikeConfig

MIN_LOSSES = 8  # spike detection needs this many losses


class SpikeDetector:
    """Detects losses far above the recent ones. All ranks add the same losses, so they get the same limit."""

    def __init__(self, config: SpikeConfig):
        self.config = config
        self.on = config.policy != "off"
        self.recent: deque[float] = deque(maxlen=config.window)

    def limit(self) -> float:
        """Return the limit above which a loss is a spike: the median plus `factor` robust standard deviations."""
        if not self.on or len(self.recent) < MIN_LOSSES:
            return math.inf

        median = statistics.median(self.recent)
        deviation = statistics.median(abs(loss - median) for loss in self.recent)

        # 1.4826 turns the median absolute deviation of normally distributed losses into their standard deviation. For a
        # loss that hardly changes this is almost 0, so at least 1 % of the median is used.
        return median + self.config.factor * max(1.4826 * deviation, 0.01 * abs(median))

    def add(self, loss: float) -> None:
        if self.on and math.isfinite(loss):
            self.recent.append(loss)
