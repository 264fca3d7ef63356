"""What a backward starts with: 1, or for fp16 the loss scale, on which all ranks agree."""

from __future__ import annotations

import math
from typing import Any

import torch

from lockstep.precision import DynamicScaler
from lockstep.runtime.context import Runtime


class LossScale:
    def __init__(self, scaler: DynamicScaler | None, runtime: Runtime):
        self.scaler, self.runtime = scaler, runtime

    @property
    def value(self) -> float:
        return self.scaler.value / (self.scaler.unit_weight or 1.0) if self.scaler else 1.0

    @property
    def logarithm(self) -> float:
        """What travels in the control word, for the ranks to compare."""
        return math.log2(self.scaler.value) if self.scaler else 0.0

    @property
    def unknown(self) -> bool:
        """Before the first micro-batch: nobody knows what a usual step weighs."""
        return self.scaler is not None and self.scaler.unit_weight is None

    def find_unit(self, weight: Any, samples: int, global_batch: int, silent: bool) -> None:
        """The weight of a usual step, as a power of two; found once, from the first micro-batches of all ranks that are
        not `silent`, equal on all of them.

        We backpropagate sums, while loss scales are thought of for means: the fp16 scale is divided by this.
        """
        assert self.scaler is not None
        counts = [0.0, 0.0] if silent else [float(weight), float(samples)]
        mine = torch.tensor(counts, dtype=torch.float64, device=self.runtime.device)
        total, seen = self.runtime.collectives.sum_(mine).tolist()
        self.scaler.unit_weight = 2.0 ** round(math.log2(max(1.0, total / max(1.0, seen) * global_batch)))

    def check_equal(self, logarithms: float, ranks: int) -> None:
        """`logarithms`: their sum over all ranks."""
        if self.scaler and abs(logarithms / ranks - self.logarithm) > 1e-3:
            raise RuntimeError(f"the ranks' loss scales differ: here {self.scaler.value}")
