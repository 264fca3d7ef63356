"""The hrm task, with puzzles that leave their slots after one, two or three segments from the first step on."""

from lockstep.recipes.hrm import HRM
from lockstep.recipes.hrm.carry import Piece
from lockstep.recipes.hrm.model import Thought


class Restless(HRM):
    """An untrained model hardly ever halts by itself, so here the puzzle decides."""

    def _moved_on(self, piece: Piece, thought: Thought) -> Piece:
        piece = super()._moved_on(piece, thought)
        return piece | {"halted": piece["halted"] | ((piece["inputs"][:, 0] + piece["steps"]) % 3 == 0)}
