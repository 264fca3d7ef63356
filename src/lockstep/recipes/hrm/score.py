"""What a segment of training cost, and which puzzles end with it.

A part of the model's call, not of the task's code around it: these are many small operations, which a GPU takes in one
go when they are compiled or captured together with the model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.recipes.hrm.losses import cell_loss, right_cells, solved

COUNTS = ("exact", "cells", "all_cells", "q_halt", "segments", "ended")


class Question(NamedTuple):
    """What a segment is judged by."""

    labels: Tensor  # (B, S)
    steps: Tensor  # (B,): segments so far, with this one
    least: Tensor  # (B,): the fewest to think about it


class Score(NamedTuple):
    total: Tensor  # the loss, added over puzzles
    halted: Tensor  # (B,)
    counts: Tensor  # COUNTS, of the puzzles that end here: the others are not finished


class Scoring(nn.Module):
    def __init__(self, loss: str, halt_max_steps: int):
        super().__init__()
        self.loss, self.halt_max_steps = loss, halt_max_steps

    def forward(self, z_h: Tensor, logits: Tensor, q: Tensor, next_q: Tensor | None, question: Question) -> Score:
        """Shapes as in the model. Without `next_q` (TRM) nobody learns the worth of going on."""
        labels, steps, _ = question
        halted = self.halted(z_h.detach(), q.detach(), question)
        asked, right = right_cells(logits, labels)
        exact = solved(asked, right)
        q = q.float()
        total = cell_loss(self.loss, logits, labels).sum()
        total = total + 0.5 * F.binary_cross_entropy_with_logits(q[:, 0], exact.float(), reduction="sum")
        if next_q is not None:
            total = total + 0.5 * self._cost_of_going_on(q[:, 1], next_q.float(), steps)
        knows = ~((q[:, 0] > 0) ^ exact)
        of_puzzle = [exact, right.sum(dim=1), asked.sum(dim=1), knows, steps, torch.ones_like(steps)]
        return Score(total.float(), halted, (torch.stack(of_puzzle) * halted).sum(dim=1).double())

    def halted(self, z_h: Tensor, q: Tensor, question: Question) -> Tensor:
        """(B,): by the model's wish, or at the limit."""
        wants = q[:, 0] > (q[:, 1] if q.shape[1] > 1 else 0.0)
        # A state that is not finite would spoil every step until its puzzle is through.
        broken = ~z_h.flatten(1).isfinite().all(dim=1)
        return (question.steps >= self.halt_max_steps) | (wants & (question.steps >= question.least)) | broken

    def _cost_of_going_on(self, q_continue: Tensor, next_q: Tensor, steps: Tensor) -> Tensor:
        """Going on is worth what the best choice after it is worth; after the last segment there is only halting."""
        best = torch.where(steps >= self.halt_max_steps, next_q[:, 0], next_q.amax(dim=1))
        return F.binary_cross_entropy_with_logits(q_continue, best.sigmoid(), reduction="sum")
