"""The puzzles and states that stay in the slots of the global batch from one step to the next.

A puzzle stays in its slot for several steps, until the model (or the limit) halts it; then the slot takes the puzzle
that the next batch has for it. Slots number the samples of a global step, so nothing here depends on ranks: a rank
holds the slots of its micro-batches, a checkpoint holds all slots, and a resumed rank takes the slots that are now its
own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UserError

Slots = dict[str, Tensor]  # every tensor has one row for each slot


class Carry:
    """The slots of one rank. A micro-batch is named by its first slot."""

    def __init__(self) -> None:
        self._held: dict[int, Slots] = {}  # the slots of each micro-batch, by its first slot
        self._restored: Slots = {}  # all slots of a checkpoint, until the first step after it has ended
        self._first_step = True

    def take(self, first: int, count: int) -> Slots | None:
        """Return the contents of the `count` slots from `first` on, or None if they are still empty."""
        # The usual case: the same micro-batch as in the step before.
        if first in self._held and len(self._held[first]["steps"]) == count:
            return self._held[first]

        # After a resume, possibly with other ranks or micro-batches: rows of the checkpoint.
        if self._restored and first + count <= len(self._restored["steps"]):
            return {name: rows[first : first + count] for name, rows in self._restored.items() if name != "slots"}

        if self._first_step and not self._restored:
            return None

        raise UserError(
            f"hrm needs the same slots of the global batch in every step; samples {first} to {first + count - 1} are "
            "new on this rank",
            "a puzzle stays in its slot for several steps",
            "set tail=drop and leave load_balance out",
        )

    def put(self, first: int, slots: Slots) -> None:
        self._held[first] = slots

    def end_step(self) -> None:
        """Every rank has taken its slots of a restored checkpoint by now."""
        self._restored = {}
        self._first_step = False

    def state_dict(self) -> dict[str, Any]:
        """Return the slots of all ranks. Collective: every rank must call it."""
        if not self._held:
            return dict(self._restored)

        # This rank's rows, with the numbers of their slots.
        firsts = sorted(self._held)
        held = [self._held[first] for first in firsts]
        numbers = [first + torch.arange(len(slots["steps"])) for first, slots in zip(firsts, held, strict=True)]
        local = {"slots": torch.cat(numbers).to(held[0]["steps"].device)}
        for name in held[0]:
            local[name] = torch.cat([slots[name] for slots in held])

        # In the order of slots, which does not depend on the number of ranks.
        gathered = dict(zip(local, gather_rows(list(local.values()), world_size()), strict=True))
        order = gathered["slots"].argsort()
        return {name: rows[order] for name, rows in gathered.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._held = {}
        self._restored = state
        self._first_step = True


def refill(slots: Slots | None, batch: Slots, start: Callable[[], tuple[Tensor, Tensor]]) -> Slots:
    """Put the puzzles of `batch` into the slots that have halted and leave the other slots alone.

    `begin` (B,) of the result marks the new puzzles. Their states are still those of the puzzle before; the model
    resets them where `begin` is true. `start` returns the states for slots that are used for the first time.
    """
    fresh = {**batch, "steps": torch.zeros_like(batch["least"])}
    if slots is None:
        z_h, z_l = start()
        return {**fresh, "z_h": z_h, "z_l": z_l, "begin": torch.ones_like(batch["least"], dtype=torch.bool)}

    # A checkpoint may come from another device.
    held = {name: rows.to(batch["least"].device) for name, rows in slots.items()}
    halted = held["halted"]
    filled = {
        name: torch.where(halted[:, None] if rows.dim() > 1 else halted, rows, held[name])
        for name, rows in fresh.items()
    }
    return {**filled, "z_h": held["z_h"], "z_l": held["z_l"], "begin": halted}


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gather_rows(tensors: list[Tensor], size: int) -> list[Tensor]:
    """Gather the rows of each tensor from `size` ranks, in the order of ranks. They may hold different numbers of rows.

    All tensors travel as bytes in one message, whatever their dtypes. Collective: every rank must call it.
    """
    if size == 1:
        return tensors

    # One row of bytes for each row of the tensors.
    rows = len(tensors[0])
    parts = [t.contiguous().view(rows, -1).view(torch.uint8) for t in tensors]
    widths = [part.shape[1] for part in parts]
    device = tensors[0].device

    # The messages must have equal sizes, so the longest one decides. The host waits here.
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([rows], device=device))
    message = torch.zeros(max(map(int, counts)), sum(widths), dtype=torch.uint8, device=device)
    message[:rows] = torch.cat(parts, dim=1)
    padded = [torch.empty_like(message) for _ in range(size)]
    dist.all_gather(padded, message)

    # Back to one tensor for each of ours: cut the padding, split the bytes, restore dtype and shape.
    gathered = torch.cat([padded_rows[: int(count)] for padded_rows, count in zip(padded, counts, strict=True)])
    columns = gathered.split(widths, dim=1)
    return [
        column.contiguous().view(tensor.dtype).view(-1, *tensor.shape[1:])
        for column, tensor in zip(columns, tensors, strict=True)
    ]
