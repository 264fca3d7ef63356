"""What each place of the global batch is thinking about, from one step to the next.

A puzzle stays in its slot for several steps, until the model (or the limit) halts it; then the slot takes the puzzle
that the next batch has for it. Slots count the samples of a global step. No rank enters: a rank holds the slots of its
micro-batches, a checkpoint holds all of them, and whoever resumes takes those that are its own now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.recipes.hrm.exchange import gather_rows, world_size

TrainedBatch = dict[str, Tensor]  # every tensor has a row for each slot


class Carry:
    def __init__(self) -> None:
        self._held: dict[int, TrainedBatch] = {}  # by the first slot of a micro-batch
        self._saved: TrainedBatch = {}  # of a checkpoint, until every rank has taken its own
        self._first_step = True

    def take(self, first: int, count: int) -> TrainedBatch | None:
        """What the slots from `first` on hold; None if they have held nothing yet."""
        if first in self._held and len(self._held[first]["steps"]) == count:
            return self._held[first]
        if self._saved and first + count <= len(self._saved["steps"]):
            return {name: rows[first : first + count] for name, rows in self._saved.items() if name != "slots"}
        if self._first_step and not self._saved:
            return None
        raise UserError(
            "the same slots of the global batch in every step, since a puzzle stays in its slot",
            f"samples {first} to {first + count - 1} of a step, which this rank has not held before",
            "type tail=drop and leave speed_weights out",
        )

    def put(self, first: int, piece: TrainedBatch) -> None:
        self._held[first] = piece

    def end_step(self) -> None:
        self._saved, self._first_step = {}, False

    def state_dict(self) -> dict[str, Any]:
        """All slots of all ranks: every rank must call this."""
        if not self._held:
            return dict(self._saved)
        firsts = sorted(self._held)
        pieces = [self._held[first] for first in firsts]
        slots = [first + torch.arange(len(p["steps"])) for first, p in zip(firsts, pieces, strict=True)]
        mine = {"slots": torch.cat(slots).to(pieces[0]["steps"].device)}
        mine |= {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        everybody = dict(zip(mine, gather_rows(list(mine.values()), world_size()), strict=True))
        order = everybody["slots"].argsort()
        return {name: rows[order] for name, rows in everybody.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._held, self._saved, self._first_step = {}, state, True


def filled(piece: TrainedBatch | None, batch: TrainedBatch, start: Callable[[], tuple[Tensor, Tensor]]) -> TrainedBatch:
    """Where a slot has halted, the next puzzle; elsewhere what was there. `begin` says where: the states are those of
    before, and whoever thinks on lets them begin anew there."""
    fresh = {**batch, "steps": torch.zeros_like(batch["least"])}
    if piece is None:
        z_h, z_l = start()
        return {**fresh, "z_h": z_h, "z_l": z_l, "begin": torch.ones_like(batch["least"], dtype=torch.bool)}
    device = batch["least"].device
    here = {name: rows.to(device) for name, rows in piece.items()}  # a checkpoint may come from elsewhere
    halted = here["halted"]
    taken = {
        name: torch.where(halted[:, None] if rows.dim() > 1 else halted, rows, here[name])
        for name, rows in fresh.items()
    }
    return {**taken, "z_h": here["z_h"], "z_l": here["z_l"], "begin": halted}
