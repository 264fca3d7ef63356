"""Tensors from one rank to another, when the receiver does not know their sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UserError

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOST, DIMENSIONS = 8, 8  # tensors at once, and dimensions of each
_LENGTH = 1 + MOST * (2 + DIMENSIONS)


def send(tensors: Sequence[Tensor], to: int, group: dist.ProcessGroup) -> None:
    """`to` is a rank of the group."""
    if len(tensors) > MOST or any(t.dim() > DIMENSIONS or t.dtype not in TYPES for t in tensors):
        raise UserError(
            "to pass tensors to the next stage",
            f"{len(tensors)} of them: {', '.join(f'{t.dtype} {tuple(t.shape)}' for t in tensors[:MOST])}",
            f"pass at most {MOST} tensors of at most {DIMENSIONS} dimensions, of floating-point numbers",
        )
    header = [len(tensors)]
    for t in tensors:
        header += [TYPES.index(t.dtype), t.dim(), *t.shape, *[0] * (DIMENSIONS - t.dim())]
    header += [0] * (_LENGTH - len(header))
    dist.send(torch.tensor(header, device=tensors[0].device), group=group, group_dst=to)
    for t in tensors:
        dist.send(t.contiguous(), group=group, group_dst=to)


def receive(source: int, group: dist.ProcessGroup, device: torch.device) -> list[Tensor]:
    packed = torch.zeros(_LENGTH, dtype=torch.int64, device=device)
    dist.recv(packed, group=group, group_src=source)
    count, *rest = packed.tolist()
    found = []
    for number in range(count):
        dtype, dim, *shape = rest[number * (2 + DIMENSIONS) : (number + 1) * (2 + DIMENSIONS)]
        found.append(torch.empty(shape[:dim], dtype=TYPES[dtype], device=device))
    for tensor in found:
        dist.recv(tensor, group=group, group_src=source)
    return found
