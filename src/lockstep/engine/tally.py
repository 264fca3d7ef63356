"""What the micro-batches of one step have cost on this rank: its part of the control word, and of the log."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from lockstep.engine.exact import LOSS_GRID, WEIGHT_GRID, check_weight, on_grid
from lockstep.observe.metrics import Sums
from lockstep.task import Loss, MicroBatch


class Piece(NamedTuple):
    """A micro-batch that this rank has gone through: which samples. What they cost is in the step's sums."""

    index: int
    epoch: int
    ids: Any


class Tally:
    """`exact`: sums that do not depend on their order. `with_loss`: the word carries the loss too."""

    def __init__(self, exact: bool = False, with_loss: bool = False):
        self._exact, self._with_loss = exact, with_loss
        self.weight: float | Tensor = 0.0
        self.loss: float | Tensor = 0.0
        self.sums = Sums()
        self.pieces: list[Piece] = []

    def add(self, loss: Loss, micro: MicroBatch, first_step: bool) -> None:
        if self._exact and (first_step or not _on_gpu(loss.weight)):
            check_weight(float(loss.weight))  # on a GPU the host would wait for it: once
        self.weight = self.weight + self._as_number(loss.weight, WEIGHT_GRID)
        self.sums.add(loss)
        self.pieces.append(Piece(micro.index, micro.epoch, micro.ids))
        if self._with_loss:
            self.loss = self.loss + self._as_number(loss.total.detach(), LOSS_GRID)

    def _as_number(self, value: Any, grid: float) -> float | Tensor:
        number = value.detach().double() if _on_gpu(value) else float(value)
        return on_grid(number, grid) if self._exact else number


def _on_gpu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"
