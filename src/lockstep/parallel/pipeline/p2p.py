"""Send tensors to another stage's rank, which does not know their shapes: a header of fixed size is sent first.

It serves evaluations and the first forward, whose shapes are not known in advance. In a training step torch's schedule
sends tensors of known shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.errors import UserError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_TENSORS = 8
MAX_DIMS = 8
# The header holds the number of tensors, then the dtype, the number of dimensions and the shape of each.
_ENTRY = 2 + MAX_DIMS
_HEADER = 1 + MAX_TENSORS * _ENTRY


def sendable(output: Any, number: int) -> list[Tensor]:
    """Return the output of stage `number` as contiguous tensors, or refuse it."""
    values = output if isinstance(output, tuple) else (output,)

    # First, since a DTensor would pass the next check.
    if any(isinstance(value, DTensor) for value in values):
        raise UserError(
            f"stage {number} returns a sharded tensor (mesh.tp), which cannot be passed to the next stage",
            "",
            'in tensor_plan(model) write "rowwise" or "gathered" for the last layer of a stage',
        )

    wrong = [v for v in values if not isinstance(v, Tensor) or not v.is_floating_point()]
    if wrong:
        kind = f"a tensor of {wrong[0].dtype}" if isinstance(wrong[0], Tensor) else f"a {type(wrong[0]).__name__}"
        raise UserError(
            f"stage {number} returns {kind}, which cannot be passed to the next stage",
            "a stage must return a floating-point tensor, or a tuple of them",
            "split in stages(model) where only activations are passed on; compute masks and positions in each stage",
        )

    return [value.contiguous() for value in values]


def send(tensors: Sequence[Tensor], to: int, group: dist.ProcessGroup | None) -> None:
    if len(tensors) > MAX_TENSORS or any(t.dim() > MAX_DIMS or t.dtype not in DTYPES for t in tensors):
        raise UserError(
            f"a stage passes {len(tensors)} tensors to the next stage that cannot be sent",
            ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in tensors[:MAX_TENSORS]),
            f"pass at most {MAX_TENSORS} tensors of at most {MAX_DIMS} dimensions, of floating-point numbers",
        )

    # All headers have the same size, so that the receiver can allocate the header beforehand.
    header = [len(tensors)]
    for t in tensors:
        header += [DTYPES.index(t.dtype), t.dim(), *t.shape, *[0] * (MAX_DIMS - t.dim())]

    header += [0] * (_HEADER - len(header))

    dist.send(torch.tensor(header, device=tensors[0].device), group=group, group_dst=to)
    for t in tensors:
        dist.send(t.contiguous(), group=group, group_dst=to)


def receive(source: int, group: dist.ProcessGroup | None, device: torch.device) -> list[Tensor]:
    header = torch.zeros(_HEADER, dtype=torch.int64, device=device)
    dist.recv(header, group=group, group_src=source)

    # On a GPU the host waits here. This happens once per new shape, and for every batch of an evaluation.
    count, *entries = header.tolist()

    tensors = []
    for index in range(count):
        dtype, dim, *shape = entries[index * _ENTRY : (index + 1) * _ENTRY]
        tensor = torch.empty(shape[:dim], dtype=DTYPES[dtype], device=device)
        dist.recv(tensor, group=group, group_src=source)
        tensors.append(tensor)

    return tensors
