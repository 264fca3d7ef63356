"""Which shards of a tensor are where.

A rank holds a plain tensor in full; a DTensor is sharded or replicated over a device mesh. These functions return which
slice of the full tensor a rank holds, and which of several copies is saved, or counted in a norm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

# Checksums reinterpret elements as integers of the same width. The keys are element sizes in bytes.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def balance(sizes: Sequence[int], holders: Sequence[Sequence[int]]) -> list[int]:
    """Choose one of its `holders` for each item, so that all ranks get about the same number of bytes.

    The largest item comes first and goes to the rank with the fewest bytes so far. Every rank computes the same answer.
    """
    chosen = [0] * len(sizes)
    loads = Counter[int]()
    # The sort is stable: items of equal size stay in order.
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        chosen[item] = min(holders[item], key=lambda rank: (loads[rank], rank))
        loads[chosen[item]] += sizes[item]

    return chosen


@dataclass(frozen=True)
class LocalShard:
    """The shard of a tensor that one rank holds. The shard of a replicated tensor is the full tensor."""

    local: Tensor  # shares the memory of the DTensor; it need not be contiguous
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]  # where the shard starts in the full tensor


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, which shares the DTensor's memory; or the plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by their device mesh; plain tensors form one group.

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

    # DTensor.full_tensor crashes over gloo if the tensor is on a GPU (torch 2.11), so this gathers through the host.
    shard = tensor.to_local().detach().cpu()
    for split in reversed(_splits(tensor)):
        shard = _gather(shard, split.dim, split.size, tensor.device_mesh.get_group(split.axis))

    return shard.to(tensor.device)


def shard_of(tensor: Tensor) -> LocalShard:
    offset = [0] * tensor.dim()
    if isinstance(tensor, DTensor):
        for split in _splits(tensor):
            offset[split.dim] += split.start

    return LocalShard(to_local(tensor), tuple(tensor.shape), tuple(offset))


def is_first_copy(tensor: DTensor) -> bool:
    """Return whether this rank is the first of the ranks that hold the same shard."""
    # Along replicated axes, inside the tensor's mesh or outside, only coordinate 0 counts as the first copy.
    replicated = [axis for axis, placement in enumerate(tensor.placements) if placement == Replicate()]
    copies = [tensor.device_mesh.get_local_rank(axis) for axis in replicated] + _coordinates_outside(tensor)
    return not any(copies)


def _chunk(size: int, shards: int, index: int) -> tuple[int, int]:
    """Return where shard `index` starts, and its length. As in torch.chunk, the last shards may be short, or empty."""
    step = -(-size // shards)
    start = min(index * step, size)

    return start, min(step, size - start)


class _Split(NamedTuple):
    """One step on the way from a full tensor to a shard."""

    axis: int  # of the mesh
    dim: int  # the dimension of the tensor that it splits
    size: int  # of that dimension, before the split
    start: int  # of this rank's slice of it


def _splits(tensor: DTensor) -> list[_Split]:
    """Return how the full tensor was split into this rank's shard, one step after another."""
    # From the leftmost axis to the rightmost, with one exception: FSDP's axis stands to the left of tp's, and FSDP
    # shards what tp sharded already.
    sharded = [(axis, placement) for axis, placement in enumerate(tensor.placements) if placement != Replicate()]

    shape = list(tensor.shape)
    splits = []

    for axis, placement in sorted(sharded, key=lambda pair: isinstance(pair[1], _StridedShard)):
        dim = placement.dim  # pyrefly: ignore[missing-attribute]
        size = shape[dim]
        start, shape[dim] = _chunk(size, tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis))
        splits.append(_Split(axis, dim, size, start))

    assert list(tensor.to_local().shape) == shape, "the shard's size does not match the tensor's placements"

    return splits


def _gather(shard: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
    """Undo a split of dimension `dim`, which had `size` elements before. Collective."""
    lengths = [_chunk(size, group.size(), index)[1] for index in range(group.size())]

    # all_gather needs equal sizes: pad to the first shard, which is the longest.
    shape = list(shard.shape)
    shape[dim] = lengths[0]
    padded = shard.new_zeros(shape)
    padded.narrow(dim, 0, shard.shape[dim]).copy_(shard)

    # As bytes: gloo does not support every dtype.
    shards = padded.new_empty(len(lengths), *shape)
    dist.all_gather(list(shards.flatten(1).view(torch.uint8)), padded.flatten().view(torch.uint8), group=group)

    return torch.cat([s.narrow(dim, 0, length) for s, length in zip(shards, lengths, strict=True)], dim)


def _coordinates_outside(tensor: DTensor) -> list[int]:
    """Return this rank's coordinates along the axes of the root mesh that are not in the tensor's own mesh."""
    # The tensor is replicated along these axes, except along pp, whose stages hold different tensors.
    inner = (*(tensor.device_mesh.mesh_dim_names or ()), "pp")
    root = tensor.device_mesh._get_root_mesh()
    named = zip(root.mesh_dim_names or (), root.get_coordinate() or [], strict=True)

    return [position for name, position in named if name not in inner]


def dtensor_like(shard: Tensor, reference: Tensor) -> Tensor:
    """Return a DTensor with this shard, laid out like `reference`; or the shard if `reference` is a plain tensor."""
    return _dtensor(shard, reference, reference.placements, reference) if isinstance(reference, DTensor) else shard


def dtensor_by_rows(shard: Tensor, reference: Tensor, shape: Sequence[int], replicate: bool = False) -> Tensor:
    """Return a DTensor of `shape` whose rows are on the same ranks as `reference`'s; with `replicate`, on every rank.

    If `reference` is a plain tensor, the shard itself is returned.
    """
    if not isinstance(reference, DTensor):
        return shard

    placements = [Replicate()] * reference.device_mesh.ndim if replicate else reference.placements

    # The meta tensor gives shape and stride and takes no memory.
    return _dtensor(shard, reference, placements, torch.empty(tuple(shape), device="meta"))


def _dtensor(shard: Tensor, reference: DTensor, placements: Sequence[Placement], full: Tensor) -> DTensor:
    return DTensor.from_local(
        shard.to(reference.device),
        reference.device_mesh,
        placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def is_sharded_by_rows(tensor: DTensor) -> bool:
    return all(placement in (Replicate(), Shard(0)) for placement in tensor.placements)


def in_memory_order_of(parameter: Tensor, values: Tensor) -> Tensor:
    """Return `values`, of the same shape, with its elements in memory in the same order as those of `parameter`.

    That is how autograd and optimizers make gradients and moments (channels_last, transposed). Fused optimizers go
    through memory without a look at strides: other orders are silently wrong on a CPU, and an error on a GPU.
    """
    # FSDP shards no parameter of another order than that of its indices.
    if isinstance(parameter, DTensor) or values.stride() == parameter.stride():
        return values

    # The strides of a parameter that leaves gaps are not those of its gradient.
    ordered = torch.empty_like(parameter, dtype=values.dtype, device=values.device)
    return values if values.stride() == ordered.stride() else ordered.copy_(values)


def squared_norms(tensors: list[Tensor], ranks: int | None = None) -> Tensor:
    """Return this rank's terms of the tensors' squared norms, [len(tensors)] in float64.

    Summed over `ranks` ranks (default: all) they are the squared norms. Elements that several ranks hold count once.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)

    if ranks is None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1

    terms = torch.stack([to_local(tensor).detach().double().square().sum() for tensor in tensors])

    # Each of several ranks that hold the same elements adds its fraction of their sum.
    copies = torch.tensor([ranks / _count_shards(tensor) for tensor in tensors], dtype=torch.float64)
    return terms / copies.to(terms.device)


def _count_shards(tensor: Tensor) -> int:
    if not isinstance(tensor, DTensor):
        return 1

    axes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in axes if placement != Replicate())


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of a plain tensor as bytes: uint8 (nbytes,). It shares memory with the tensor if it can."""
    flat = tensor.detach().contiguous().reshape(-1)

    # One element counts as contiguous whatever its stride is, but cannot be viewed as bytes then.
    if flat.stride() != (1,):
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Return for each tensor, or this rank's shard of it, the sum of its elements read as integers.

    Unlike a norm, this sum changes with any single bit.
    """
    sums = [
        to_local(t.detach())
        .contiguous()
        .reshape(-1)
        .view(INTEGERS.get(t.element_size(), torch.uint8))
        .sum(dtype=torch.int64)
        for t in tensors
    ]

    # Read all sums at once, so that the host waits once. A model on several devices cannot do that.
    if len({total.device for total in sums}) == 1:
        return torch.stack(sums).tolist()

    return [int(total) for total in sums]
