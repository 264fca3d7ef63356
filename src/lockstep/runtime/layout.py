"""Where the parts of a tensor lie. A plain tensor is whole on every rank; a DTensor is cut or copied over a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
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
    if not isinstance(tensor, DTensor):
        return tensor
    if dist.get_backend(tensor.device_mesh.get_group(0)) != "gloo":
        return tensor.full_tensor()
    # torch's own gathering crashes over gloo when the tensor lies on a GPU (2.11): through the host it is sound.
    part = tensor.to_local().detach().cpu()
    for cut in reversed(_cuts(tensor)):
        part = _gathered(part, cut, tensor.device_mesh.get_group(cut.axis))
    return part.to(tensor.device)


def block_of(tensor: DTensor) -> Block:
    part, place = tensor.to_local(), _place(tensor)
    shape, offset = list(tensor.shape), [0] * tensor.dim()
    for cut in _cuts(tensor):
        start = cut.start(place[cut.axis])
        offset[cut.dim] += start
        shape[cut.dim] = cut.length(place[cut.axis])
    assert list(part.shape) == shape, "a part of another size than its layout says"
    copies = [where for where, placement in zip(place, tensor.placements, strict=True) if placement == Replicate()]
    return Block(part, tuple(tensor.shape), tuple(offset), first_copy=not any([*copies, *_places_outside(tensor)]))


@dataclass(frozen=True)
class _Cut:
    """One axis of a mesh cuts one dimension: as torch.chunk does, so the last parts may be short, or empty."""

    axis: int
    dim: int
    size: int  # of the dimension, before this cut
    parts: int

    @property
    def step(self) -> int:
        return -(-self.size // self.parts)

    def start(self, place: int) -> int:
        return min(place * self.step, self.size)

    def length(self, place: int) -> int:
        return min(self.step, self.size - self.start(place))


def _cuts(tensor: DTensor) -> list[_Cut]:
    """In the order in which this rank's part came about."""
    shape, place, found = list(tensor.shape), _place(tensor), []
    for axis in _in_order_of_cutting(tensor.placements):
        dim = tensor.placements[axis].dim  # pyrefly: ignore[missing-attribute]
        found.append(cut := _Cut(axis, dim, shape[dim], tensor.device_mesh.size(axis)))
        shape[dim] = cut.length(place[axis])
    return found


def _place(tensor: DTensor) -> list[int]:
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "this rank has no part of the tensor"
    return list(place)


def _gathered(part: Tensor, cut: _Cut, group: dist.ProcessGroup) -> Tensor:
    """Undo one cut: parts travel at one length, as bytes, since gloo knows not every format."""
    shape = list(part.shape)
    shape[cut.dim] = cut.step
    sent = part.new_zeros(shape)
    sent.narrow(cut.dim, 0, part.shape[cut.dim]).copy_(part)
    received = [torch.empty_like(sent) for _ in range(cut.parts)]
    dist.all_gather([_as_bytes(one) for one in received], _as_bytes(sent), group=group)
    lengths = [cut.length(place) for place in range(cut.parts)]
    return torch.cat([one.narrow(cut.dim, 0, n) for one, n in zip(received, lengths, strict=True)], cut.dim)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


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


def squared_norms(tensors: list[Tensor], ranks: int | None = None) -> Tensor:
    """Of this rank's parts, in float64. What several ranks hold counts once in a sum over `ranks` ranks (all)."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    if ranks is None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
    here = torch.stack([local(tensor).detach().double().square().sum() for tensor in tensors])
    copies = torch.tensor([ranks / _parts(tensor) for tensor in tensors], dtype=torch.float64)
    return here / copies.to(here.device)


def _parts(tensor: Tensor) -> int:
    """How many it is cut into."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement != Replicate())
