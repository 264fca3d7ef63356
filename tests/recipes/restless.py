"""The hrm task with puzzles that halt after one, two or three segments, from the first step on."""

from torch import Tensor

from lockstep.recipes.hrm import HRM
from lockstep.recipes.hrm.losses import Scoring, SegmentTargets


class Impatient(Scoring):
    """An untrained model hardly ever halts by itself, so here the puzzle decides."""

    def halted(self, z_h: Tensor, q: Tensor, question: SegmentTargets) -> Tensor:
        return super().halted(z_h, q, question) | ((question.labels[:, 0] + question.steps) % 3 == 0)


class Restless(HRM):
    scoring = Impatient
