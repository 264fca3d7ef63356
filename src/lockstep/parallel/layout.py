"""Where the parts of a tensor lie. A plain tensor is whole on every rank; a DTensor is cut or copied over a mesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class Block:
    """This rank's part of a tensor of `shape`: it lies at `offset`."""

    local: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    first_copy: bool  # of several ranks that hold the same part, the one that speaks for them


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_cut(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """All of it. Every rank of its mesh must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def block_of(tensor: DTensor) -> Block:
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    part = tensor.to_local()
    assert tuple(part.shape) == tuple(shape), "a part of another size than its layout says"
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "this rank has no part of the tensor"
    copies = [where for where, placement in zip(place, tensor.placements, strict=True) if placement == Replicate()]
    return Block(part, tuple(tensor.shape), tuple(offset), first_copy=not any(copies))


def like(part: Tensor, model: DTensor) -> DTensor:
    """`part` of a tensor that is laid out like `model`."""
    here = part.to(model.device)
    return DTensor.from_local(
        here, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )


def squared_lengths(tensors: list[Tensor]) -> Tensor:
    """Of this rank's parts, in float64. What several ranks hold counts once in a sum over all ranks."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    here = torch.stack([local(tensor).detach().double().square().sum() for tensor in tensors])
    copies = torch.tensor([_copies(tensor) for tensor in tensors], dtype=torch.float64)
    return here / copies.to(here.device)


def _copies(tensor: Tensor) -> int:
    """How many ranks hold the same part."""
    if not isinstance(tensor, DTensor):
        return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    count = 1
    for size, placement in sizes:
        count *= size if placement == Replicate() else 1
    return count
