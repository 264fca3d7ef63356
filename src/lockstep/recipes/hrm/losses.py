"""What an answer costs, cell by cell."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = 0  # the padding symbol: a cell with this label asks for nothing


def stablemax_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p with p = s / sum s, where s(x) = x + 1 from 0 on, and 1 / (1 - x) below: it cannot blow up, but the ratios
    are small, so float64."""
    x = logits.double()
    # Cut at 0: at x = 1 the other branch would be infinite, and its gradient, though not chosen, not a number.
    s = torch.where(x < 0, 1 / (1 - x.clamp(max=0)), x + 1)
    p = s / s.sum(dim=-1, keepdim=True)
    return -p.gather(-1, labels[..., None]).squeeze(-1).log()


def softmax_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


LOSSES = {"stablemax": stablemax_cross_entropy, "softmax": softmax_cross_entropy}


def cell_loss(kind: str, logits: Tensor, labels: Tensor) -> Tensor:
    """(B,): of each puzzle the mean over its cells that ask for something: large ones weigh like small ones."""
    asked = labels != IGNORED
    costs = LOSSES[kind](logits, labels.long()) * asked
    return costs.sum(dim=1) / asked.sum(dim=1).clamp(min=1)


def right_cells(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(B, S) each: cells that ask for something, and those of them that are right."""
    asked = labels != IGNORED
    return asked, (logits.argmax(dim=-1) == labels) & asked


def solved(asked: Tensor, right: Tensor) -> Tensor:
    """(B,): nothing that was asked for is wrong."""
    return (right | ~asked).all(dim=1)
