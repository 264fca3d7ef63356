"""Buffers of rank 0 for all ranks, before evaluating or saving."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from torch import Tensor

from lockstep.errors import UserError
from lockstep.runtime.collectives import Collectives


def broadcast_buffers(buffers: Mapping[str, Tensor], collectives: Collectives) -> None:
    """Copy rank 0's buffers, given by name, to all ranks. Raise on all of them if a forward has changed their layout.

    A forward may register a buffer, or replace it by a larger one, depending on the samples of this rank.
    """
    # By name: ranks may have registered them in another order.
    buffers = dict(sorted(buffers.items()))
    layout = {name: f"{buffer.dtype} {tuple(buffer.shape)}" for name, buffer in buffers.items()}

    # A few bytes, in place of all names in every step.
    if len(set(collectives.all_gather_json(zlib.crc32(repr(layout).encode())))) > 1:
        first, *others = collectives.all_gather_json(layout)
        for rank, other in enumerate(others, start=1):
            for name in sorted({*first, *other}):
                if first.get(name) != other.get(name):
                    raise UserError(
                        f"the buffer {name!r} has another shape on rank {rank} than on rank 0",
                        f"rank 0: {first.get(name, 'missing')}; rank {rank}: {other.get(name, 'missing')}. A forward "
                        "registered or replaced it, depending on the samples of its rank",
                        "register it in __init__ with its final size; or keep what a forward caches in a plain "
                        "attribute (self.cache = tensor, not register_buffer)",
                        cause="changed-in-forward",
                    )

    collectives.broadcast_(list(buffers.values()))
