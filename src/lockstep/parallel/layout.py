"""Where the parts of a tensor lie. A plain tensor is whole on every rank; a DTensor is cut or copied over a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard


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


def grid_of(tensor: Tensor) -> DeviceMesh | None:
    """What it is laid out over; None: it is plain."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def whole(tensor: Tensor) -> Tensor:
    """All of it. Every rank of its mesh must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def block_of(tensor: DTensor) -> Block:
    part, mesh = tensor.to_local(), tensor.device_mesh
    place = mesh.get_coordinate()
    assert place is not None, "this rank has no part of the tensor"
    shape, offset = list(tensor.shape), [0] * tensor.dim()
    for axis in _in_order_of_cutting(tensor.placements):
        dim = tensor.placements[axis].dim  # pyrefly: ignore[missing-attribute]
        step = -(-shape[dim] // mesh.size(axis))  # as torch.chunk: the last parts may be short, or empty
        start = min(place[axis] * step, shape[dim])
        offset[dim] += start
        shape[dim] = min(step, shape[dim] - start)
    assert list(part.shape) == shape, "a part of another size than its layout says"
    copies = [where for where, placement in zip(place, tensor.placements, strict=True) if placement == Replicate()]
    return Block(part, tuple(tensor.shape), tuple(offset), first_copy=not any([*copies, *_places_outside(tensor)]))


def _in_order_of_cutting(placements: Sequence[Placement]) -> list[int]:
    """The axes that cut: from left to right, but FSDP cuts what tp has cut before, and stands to the left of it."""
    cutting = [axis for axis, placement in enumerate(placements) if placement != Replicate()]
    return sorted(cutting, key=lambda axis: isinstance(placements[axis], _StridedShard))


def _places_outside(tensor: DTensor) -> list[int]:
    """This rank's coordinates along the axes of the whole grid that the tensor is not laid out over: it is copied
    along those. Not along pp, whose stages hold different tensors."""
    inner = tensor.device_mesh.mesh_dim_names or ()
    grid = tensor.device_mesh._get_root_mesh()
    place = grid.get_coordinate() or []
    return [where for name, where in zip(grid.mesh_dim_names or (), place, strict=True) if name not in (*inner, "pp")]


def like(part: Tensor, model: DTensor) -> DTensor:
    """`part` of a tensor that is laid out like `model`."""
    here = part.to(model.device)
    return DTensor.from_local(
        here, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )


def laid_out(part: Tensor, model: DTensor, shape: Sequence[int], whole: bool = False) -> DTensor:
    """`part` of a tensor of `shape` whose rows lie where those of `model` lie; or `whole`, the same on every rank."""
    placements = [Replicate()] * model.device_mesh.ndim if whole else model.placements
    full = torch.empty(tuple(shape), device="meta")
    here = part.to(model.device)
    return DTensor.from_local(
        here, model.device_mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def only_rows(tensor: DTensor) -> bool:
    """Whether it is cut along its first dimension only."""
    return all(placement in (Replicate(), Shard(0)) for placement in tensor.placements)


def squared_lengths(tensors: list[Tensor], ranks: int | None = None) -> Tensor:
    """Of this rank's parts, in float64. What several ranks hold counts once in a sum over `ranks` ranks (all)."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    if ranks is None:
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    here = torch.stack([local(tensor).detach().double().square().sum() for tensor in tensors])
    copies = torch.tensor([ranks / _parts(tensor) for tensor in tensors], dtype=torch.float64)
    return here / copies.to(here.device)


def _parts(tensor: Tensor) -> int:
    """How many it is cut into."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement != Replicate())
