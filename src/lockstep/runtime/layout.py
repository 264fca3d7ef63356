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
    for axis, dim, size in reversed(_splits(tensor)):
        shard = _gather(shard, dim, size, tensor.device_mesh.get_group(axis))
    return shard.to(tensor.device)


def block_of(tensor: DTensor) -> Block:
    """Return which block of the full tensor this rank holds."""
    shard = tensor.to_local()
    coordinate = _coordinate(tensor)
    shape = list(tensor.shape)
    offset = [0] * tensor.dim()
    for axis, dim, size in _splits(tensor):
        start, shape[dim] = _chunk(size, tensor.device_mesh.size(axis), coordinate[axis])
        offset[dim] += start
    assert list(shard.shape) == shape, "a shard of another size than its layout says"

    # Along replicated axes, inside its mesh or outside, only coordinate 0 counts as the first copy.
    axes = zip(coordinate, tensor.placements, strict=True)
    copies = [position for position, placement in axes if placement == Replicate()] + _coordinates_outside(tensor)
    return Block(shard, tuple(tensor.shape), tuple(offset), first_copy=not any(copies))


def _chunk(size: int, shards: int, index: int) -> tuple[int, int]:
    """Return where shard `index` starts, and its length. As with torch.chunk, the last ones may be short, or empty."""
    step = -(-size // shards)
    start = min(index * step, size)
    return start, min(step, size - start)


def _splits(tensor: DTensor) -> list[tuple[int, int, int]]:
    """Return the splits in the order in which this rank's shard came about.

    Each is a mesh axis, the dimension that it splits, and the size of that dimension before.
    """
    # The sharded axes, left to right; but FSDP shards what tp has sharded, and stands to the left of it.
    sharded = [(axis, placement) for axis, placement in enumerate(tensor.placements) if placement != Replicate()]
    sharded.sort(key=lambda pair: isinstance(pair[1], _StridedShard))

    shape = list(tensor.shape)
    coordinate = _coordinate(tensor)
    splits = []
    for axis, placement in sharded:
        dim = placement.dim  # pyrefly: ignore[missing-attribute]
        splits.append((axis, dim, shape[dim]))
        _, shape[dim] = _chunk(shape[dim], tensor.device_mesh.size(axis), coordinate[axis])
    return splits


def _coordinate(tensor: DTensor) -> list[int]:
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank has no shard of the tensor"
    return list(coordinate)


def _gather(shard: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
    """Undo the split of dimension `dim`, which had `size` elements.

    Shards travel padded to one length, as bytes, since gloo does not know every dtype.
    """
    lengths = [_chunk(size, group.size(), index)[1] for index in range(group.size())]
    shape = list(shard.shape)
    shape[dim] = lengths[0]
    padded = shard.new_zeros(shape)
    padded.narrow(dim, 0, shard.shape[dim]).copy_(shard)

    shards = padded.new_empty(len(lengths), *shape)
    dist.all_gather(list(shards.flatten(1).view(torch.uint8)), padded.flatten().view(torch.uint8), group=group)
    return torch.cat([s.narrow(dim, 0, length) for s, length in zip(shards, lengths, strict=True)], dim)


def _coordinates_outside(tensor: DTensor) -> list[int]:
    """Return this rank's coordinates along the axes of the root mesh that the tensor is not laid out over.

    The tensor is replicated along those; but not along pp, whose stages hold different tensors.
    """
    inner = (*(tensor.device_mesh.mesh_dim_names or ()), "pp")
    root = tensor.device_mesh._get_root_mesh()
    named = zip(root.mesh_dim_names or (), root.get_coordinate() or [], strict=True)
    return [position for name, position in named if name not in inner]


def like(shard: Tensor, model: Tensor) -> Tensor:
    """Return a DTensor with this shard, laid out like `model`; or the shard itself if `model` is a plain tensor."""
    return _dtensor(shard, model, model.placements, model) if isinstance(model, DTensor) else shard


def laid_out(shard: Tensor, model: Tensor, shape: Sequence[int], whole: bool = False) -> Tensor:
    """Return a DTensor of `shape` whose rows lie where those of `model` lie; with `whole`, replicated on every rank.

    If `model` is a plain tensor, the shard itself is returned.
    """
    if not isinstance(model, DTensor):
        return shard
    placements = [Replicate()] * model.device_mesh.ndim if whole else model.placements
    # The meta tensor gives shape and stride, and takes no memory.
    return _dtensor(shard, model, placements, torch.empty(tuple(shape), device="meta"))


def _dtensor(shard: Tensor, model: DTensor, placements: Sequence[Placement], full: Tensor) -> DTensor:
    return DTensor.from_local(
        shard.to(model.device),
        model.device_mesh,
        placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


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
    terms = torch.stack([local(tensor).detach().double().square().sum() for tensor in tensors])
    # Each of several ranks that hold the same elements adds its fraction of their sum.
    copies = torch.tensor([ranks / _count_shards(tensor) for tensor in tensors], dtype=torch.float64)
    return terms / copies.to(terms.device)


def _count_shards(tensor: Tensor) -> int:
    if not isinstance(tensor, DTensor):
        return 1
    axes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in axes if placement != Replicate())
