"""Where the shards of a tensor lie.

A plain tensor is the same in full on every rank; a DTensor is sharded or replicated over a device mesh. These functions
answer what torch does not: which block of the full tensor a rank holds, and its norm over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard


@dataclass(frozen=True)
class Block:
    """This rank's block of a tensor of `shape`; it starts at `offset`."""

    local: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    first_copy: bool  # of several ranks that hold the same block, the one that saves it


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by the mesh that they are laid out over; plain ones are a group of their own.

    torch's foreach and fused kernels, and an all-reduce, take tensors of one mesh only.
    """
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        groups.setdefault(mesh, []).append(tensor)
    return list(groups.values())


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather the full tensor. Collective: every rank of its mesh must call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    if dist.get_backend(tensor.device_mesh.get_group(0)) != "gloo":
        return tensor.full_tensor()

    # torch's own gathering crashes over gloo when the tensor lies on a GPU (2.11), so it goes through the host.
    shard = tensor.to_local().detach().cpu()
    for split in reversed(_splits(tensor)):
        shard = _gather(shard, split, tensor.device_mesh.get_group(split.axis))
    return shard.to(tensor.device)


def block_of(tensor: DTensor) -> Block:
    """Return which block of the full tensor this rank holds."""
    shard = tensor.to_local()
    coordinate = _coordinate(tensor)
    shape = list(tensor.shape)
    offset = [0] * tensor.dim()
    for split in _splits(tensor):
        offset[split.dim] += split.start(coordinate[split.axis])
        shape[split.dim] = split.length(coordinate[split.axis])
    assert list(shard.shape) == shape, "a shard of another size than its layout says"

    # Along replicated axes, inside its mesh or outside, only coordinate 0 counts as the first copy.
    copies = [where for where, placement in zip(coordinate, tensor.placements, strict=True) if placement == Replicate()]
    first = not any(copies) and not any(_coordinates_outside(tensor))
    return Block(shard, tuple(tensor.shape), tuple(offset), first_copy=first)


@dataclass(frozen=True)
class _Split:
    """One mesh axis splits one dimension as torch.chunk does: the last shards may be short, or empty."""

    axis: int
    dim: int
    size: int  # of the dimension, before this split
    shards: int

    @property
    def step(self) -> int:
        return -(-self.size // self.shards)

    def start(self, coordinate: int) -> int:
        return min(coordinate * self.step, self.size)

    def length(self, coordinate: int) -> int:
        return min(self.step, self.size - self.start(coordinate))


def _splits(tensor: DTensor) -> list[_Split]:
    """Return the splits in the order in which this rank's shard came about."""
    shape = list(tensor.shape)
    coordinate = _coordinate(tensor)
    found = []
    for axis in _split_order(tensor.placements):
        dim = tensor.placements[axis].dim  # pyrefly: ignore[missing-attribute]
        split = _Split(axis, dim, shape[dim], tensor.device_mesh.size(axis))
        found.append(split)
        shape[dim] = split.length(coordinate[axis])
    return found


def _split_order(placements: Sequence[Placement]) -> list[int]:
    """Return the sharded axes, left to right; but FSDP shards what tp has sharded, and stands to the left of it."""
    sharded = [axis for axis, placement in enumerate(placements) if placement != Replicate()]
    return sorted(sharded, key=lambda axis: isinstance(placements[axis], _StridedShard))


def _coordinate(tensor: DTensor) -> list[int]:
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank has no shard of the tensor"
    return list(coordinate)


def _gather(shard: Tensor, split: _Split, group: dist.ProcessGroup) -> Tensor:
    """Undo one split. Shards travel padded to one length, as bytes, since gloo does not know every dtype."""
    shape = list(shard.shape)
    shape[split.dim] = split.step
    padded = shard.new_zeros(shape)
    padded.narrow(split.dim, 0, shard.shape[split.dim]).copy_(shard)

    received = [torch.empty_like(padded) for _ in range(split.shards)]
    dist.all_gather([_as_bytes(one) for one in received], _as_bytes(padded), group=group)

    lengths = [split.length(coordinate) for coordinate in range(split.shards)]
    return torch.cat([one.narrow(split.dim, 0, n) for one, n in zip(received, lengths, strict=True)], split.dim)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _coordinates_outside(tensor: DTensor) -> list[int]:
    """Return this rank's coordinates along the axes of the root mesh that the tensor is not laid out over.

    The tensor is replicated along those; but not along pp, whose stages hold different tensors.
    """
    inner = tensor.device_mesh.mesh_dim_names or ()
    root = tensor.device_mesh._get_root_mesh()
    coordinate = root.get_coordinate() or []
    named = zip(root.mesh_dim_names or (), coordinate, strict=True)
    return [where for name, where in named if name not in (*inner, "pp")]


def like(shard: Tensor, model: DTensor) -> DTensor:
    """Return a DTensor with this shard, laid out like `model`."""
    return _dtensor(shard, model, model.placements, model.shape, model.stride())


def laid_out(shard: Tensor, model: DTensor, shape: Sequence[int], whole: bool = False) -> DTensor:
    """Return a DTensor of `shape` whose rows lie where those of `model` lie; with `whole`, replicated on every rank."""
    placements = [Replicate()] * model.device_mesh.ndim if whole else model.placements
    full = torch.empty(tuple(shape), device="meta")
    return _dtensor(shard, model, placements, full.shape, full.stride())


def _dtensor(
    shard: Tensor, model: DTensor, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    here = shard.to(model.device)
    return DTensor.from_local(here, model.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def only_rows(tensor: DTensor) -> bool:
    """Return whether the tensor is sharded along its first dimension only."""
    return all(placement in (Replicate(), Shard(0)) for placement in tensor.placements)


def squared_norms(tensors: list[Tensor], ranks: int | None = None) -> Tensor:
    """Return this rank's terms of the tensors' squared norms, [len(tensors)] in float64.

    Summed over `ranks` ranks (default: all) they are the squared norms: what several ranks hold counts once.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    if ranks is None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
    here = torch.stack([local(tensor).detach().double().square().sum() for tensor in tensors])
    copies = torch.tensor([ranks / _shards(tensor) for tensor in tensors], dtype=torch.float64)
    return here / copies.to(here.device)


def _shards(tensor: Tensor) -> int:
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement != Replicate())
