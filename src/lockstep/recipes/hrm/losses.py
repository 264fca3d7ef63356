"""The loss of an answer, cell by cell, and the score of a training segment.

`Scoring` is a part of the model's call, not of the task's code around it: it consists of many small operations, which
a GPU runs together when they are compiled or captured with the model.

Shapes in comments: B puzzles, S cells, V symbols.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.recipes.hrm.data import IGNORED

COUNTS = ("exact", "cells", "all_cells", "q_halt", "segments", "ended")


def stablemax_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return -log p (B, S) with p = s / sum s, where s(x) = x + 1 for x >= 0 and 1 / (1 - x) below.

    It cannot overflow, but the ratios can be small, so it computes in float64.
    """
    x = logits.double()
    # Clamped at 0: at x = 1 the branch for negative x would be infinite, and its gradient, though unused, would be NaN.
    s = torch.where(x < 0, 1 / (1 - x.clamp(max=0)), x + 1)
    p = s / s.sum(dim=-1, keepdim=True)
    return -p.gather(-1, labels[..., None]).squeeze(-1).log()


def softmax_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


LOSSES = {"stablemax": stablemax_cross_entropy, "softmax": softmax_cross_entropy}


def cell_loss(kind: str, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each puzzle (B,), the mean over its labelled cells: large and small puzzles weigh the same.

    logits (B, S, V), labels (B, S).
    """
    labelled = labels != IGNORED
    costs = LOSSES[kind](logits, labels.long()) * labelled
    # A puzzle without labels costs nothing, instead of 0 / 0.
    return costs.sum(dim=1) / labelled.sum(dim=1).clamp(min=1)


def correct_cells(answers: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return which cells are labelled, and which of those `answers` (B, S) has right: (B, S) each."""
    labelled = labels != IGNORED
    return labelled, (answers == labels) & labelled


def solved(labelled: Tensor, correct: Tensor) -> Tensor:
    """Return which puzzles (B,) have no wrong cell."""
    return (correct | ~labelled).all(dim=1)


class SegmentTargets(NamedTuple):
    labels: Tensor  # (B, S)
    steps: Tensor  # (B,): segments so far, including this one
    least: Tensor  # (B,): the fewest segments that the puzzle must run


class Score(NamedTuple):
    total: Tensor  # the loss, added over puzzles
    halted: Tensor  # (B,)
    counts: Tensor  # COUNTS over the puzzles that halt here; the others are not finished


class Scoring(nn.Module):
    """Computes the training loss of a segment and decides which puzzles halt with it."""

    def __init__(self, loss: str, halt_max_steps: int):
        super().__init__()
        self.loss = loss
        self.halt_max_steps = halt_max_steps

    def forward(self, z_h: Tensor, logits: Tensor, q: Tensor, next_q: Tensor | None, question: SegmentTargets) -> Score:
        """Score a segment. Shapes as in the model. Without `next_q` (TRM) the value of continuing is not learned."""
        labels, steps, _ = question
        halted = self.halted(z_h.detach(), q.detach(), question)
        labelled, correct = correct_cells(logits.argmax(dim=-1), labels)
        exact = solved(labelled, correct)

        # q[:, 0] learns whether the answer is right, q[:, 1] what one more segment is worth.
        q = q.float()
        total = cell_loss(self.loss, logits, labels).sum()
        total = total + 0.5 * F.binary_cross_entropy_with_logits(q[:, 0], exact.float(), reduction="sum")

        if next_q is not None:
            # Continuing is worth as much as the best choice after it; after the last segment there is only halting.
            next_q = next_q.float()
            best = torch.where(steps >= self.halt_max_steps, next_q[:, 0], next_q.amax(dim=1))
            total = total + 0.5 * F.binary_cross_entropy_with_logits(q[:, 1], best.sigmoid(), reduction="sum")

        # Only puzzles that halt are counted: the others are still being thought about.
        knows = ~((q[:, 0] > 0) ^ exact)
        per_puzzle = [exact, correct.sum(dim=1), labelled.sum(dim=1), knows, steps, torch.ones_like(steps)]
        return Score(total.float(), halted, (torch.stack(per_puzzle) * halted).sum(dim=1).double())

    def halted(self, z_h: Tensor, q: Tensor, question: SegmentTargets) -> Tensor:
        """Return which puzzles (B,) halt: because the model decides so, or at the limit."""
        wants = q[:, 0] > (q[:, 1] if q.shape[1] > 1 else 0.0)
        # A state that is not finite would make every step nonfinite until its puzzle has ended.
        broken = ~z_h.flatten(1).isfinite().all(dim=1)
        return (question.steps >= self.halt_max_steps) | (wants & (question.steps >= question.least)) | broken
