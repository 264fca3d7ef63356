"""All-gather with a gradient: a loss on one rank may depend on the rows of all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.runtime.collectives import Collectives

# Every rank describes its rows in a message of this length, so a tensor may have one dimension less.
HEADER = 10


@dataclass
class RowGathering:
    """Says whether `run.all_gather` has anything to gather, and notes what it has gathered."""

    batches_are_whole: bool = False  # in an evaluation: a batch is not split over the ranks
    used: bool = False  # a step has called `run.all_gather`
    row_offset: int | None = None  # where this rank's rows begin in the last result of this micro-batch

    def begin_micro_batch(self) -> None:
        """Forget the offset: in another micro-batch the ranks may have other numbers of rows."""
        self.row_offset = None

    def gather(self, rows: Tensor, collectives: Collectives, padding: bool) -> Tensor:
        """Return the rows of all ranks, and note where this rank's begin: see `gather_rows`. Collective."""
        gathered, self.row_offset = gather_rows(rows, collectives, padding)
        return gathered

    @contextmanager
    def whole_batches(self) -> Iterator[None]:
        """Return a context in which the loss gets whole batches: `run.all_gather` has nothing to gather there."""
        self.batches_are_whole = True
        try:
            yield
        finally:
            self.batches_are_whole = False


def gather_rows(rows: Tensor, collectives: Collectives, padding: bool = False) -> tuple[Tensor, int]:
    """Return the rows (n, ...) of all ranks, in the order of the ranks: (N, ...), and where this rank's begin.

    The losses of all ranks are added, so the gradient of a rank's rows is the sum of the gradients on all ranks. Rows
    of `padding` are no part of the N rows; this rank alone gets them, behind the others: (N + n, ...). Collective.
    """
    if not isinstance(rows, Tensor) or not 1 <= rows.dim() < HEADER - 1:
        found = f"a tensor with {rows.dim()} dimensions" if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
        raise UserError(f"run.all_gather takes a tensor with a row for each sample; it got {found}", "", "pass rows")

    # The numbers of rows differ at the end of an epoch. Reading them makes the host wait for the device.
    # A header is [n, checksum of the dtype, sizes of the other dimensions, -1, ...].
    own_rows = rows[:0] if padding else rows
    header = [len(own_rows), zlib.crc32(str(rows.dtype).encode()), *rows.shape[1:]]
    header += [-1] * (HEADER - len(header))
    headers = collectives.all_gather(torch.tensor(header, device=rows.device)).tolist()

    # Buffers of different sizes would abort the process, or be filled with garbage.
    if any(other[1:] != header[1:] for other in headers):
        shapes = [tuple(size for size in (other[0], *other[2:]) if size >= 0) for other in headers]
        raise UserError(
            "run.all_gather got rows of different shapes or dtypes on the ranks",
            f"the shapes, by rank, are {', '.join(map(str, shapes))}",
            "pad the rows to the same shape on all ranks, such as the longest that the dataset has",
        )

    counts = [other[0] for other in headers]
    gathered = _GatherRows.apply(own_rows, collectives, counts)

    # So that the loss of padding can find its rows like any other: its weight is 0, but it must be computed.
    if padding:
        return torch.cat([gathered, rows]), len(gathered)

    return gathered, sum(counts[: collectives.world.rank])


class _GatherRows(torch.autograd.Function):
    """Concatenates the rows of all ranks. Its backward adds the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, collectives: Collectives, counts: list[int]) -> Tensor:
        ctx.collectives = collectives
        ctx.counts = counts

        # All ranks must send the same shape: pad to the largest.
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows

        gathered = collectives.all_gather(padded)
        return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # Each rank's loss depends on the rows of all ranks, so the gradients (N, ...) of all ranks are added, and this
        # rank keeps those of its own rows (n, ...). In float32, because 16 bits would lose much of the others' shares.
        (gradient,) = gradients
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = ctx.collectives.all_reduce_(gradient.to(wide, copy=True).contiguous())

        own = total.split(ctx.counts)[ctx.collectives.world.rank]
        return own.to(gradient.dtype), None, None
