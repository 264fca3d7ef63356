"""Choose which tensors and shards each rank writes and reads. A checkpoint can be loaded on any number of ranks.

A DTensor is sharded: every rank writes its shard, and reads the slice of the full tensor that is its shard now. A plain
tensor is replicated: one of the ranks that hold it writes it, and all ranks that need it read it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.checkpoint.load import CheckpointReader
from lockstep.checkpoint.snapshot import Slice
from lockstep.runtime.layout import balance, dtensor_by_rows, dtensor_like, is_sharded_by_rows, shard_of

# ---- writing ----


def plain_sizes(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Return the bytes of the tensors that this rank holds in full."""
    return {name: tensor.nbytes for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}


def parameter_of(key: str) -> str:
    """Return the parameter's NAME in "model.NAME" or "optimizer.NUMBER.NAME.KEY"."""
    kind, _, rest = key.partition(".")
    return rest if kind == "model" else rest.partition(".")[2].rpartition(".")[0]


def slices_to_write(
    tensors: dict[str, Tensor], rank: int, sizes: list[dict[str, int]], duplicates: frozenset[str] = frozenset()
) -> list[Slice]:
    """Return the slices that this rank writes: its shards, and some of the replicated tensors, balanced by bytes.

    `sizes` holds the `plain_sizes` of each rank. `duplicates`: see `RankRole.duplicates`.
    """
    # Of several ranks with the same shard, the first on the mesh writes it. Pipeline stages are on different meshes, so
    # `duplicates` lists the tensors that a lower stage already writes. An empty shard needs no file.
    shards = {name: shard_of(tensor) for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    slices = [
        Slice(name, shard.local, shard.full_shape, shard.offset)
        for name, shard in shards.items()
        if shard.first_copy and parameter_of(name) not in duplicates and shard.local.numel()
    ]

    # Every rank computes the writers of all replicated tensors, and keeps those that it writes itself.
    return slices + [Slice.full(name, tensors[name]) for name, writer in _writers(sizes).items() if writer == rank]


def _writers(sizes: list[dict[str, int]]) -> dict[str, int]:
    """Return the rank that writes each replicated tensor. The result is the same on every rank."""
    size_of = {name: size for rank_sizes in sizes for name, size in rank_sizes.items()}
    names = sorted(size_of)

    holders = []
    for name in names:
        # The state of a part (the task, for example) may differ between ranks: only rank 0's is saved.
        if name.startswith("part."):
            holders.append([0])
        else:
            holders.append([rank for rank, rank_sizes in enumerate(sizes) if name in rank_sizes])

    writers = balance([size_of[name] for name in names], holders)
    return dict(zip(names, writers, strict=True))


def merge_plain_state(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the plain state of all ranks, which differs only where the ranks hold different parameters."""
    merged = dict(by_rank[0])

    # In a pipeline, each rank has the extra state of its stage. If several ranks have it, the lowest rank's is used: it
    # comes last here and overwrites the others.
    merged["model"] = {key: {} for key in merged["model"]}
    for plain_state in reversed(by_rank):
        for key, entries in merged["model"].items():
            entries.update(plain_state["model"][key])

    # With ZeRO-1, each rank has the state of its own parameters.
    merged["optimizers"] = [{**optimizer, "state": {}} for optimizer in merged["optimizers"]]
    for plain_state in by_rank:
        for optimizer, saved in zip(merged["optimizers"], plain_state["optimizers"], strict=True):
            optimizer["state"].update(saved["state"])

    return merged


def read_into(target: Tensor, name: str, reader: CheckpointReader) -> None:
    """Read the tensor `name` into `target` (any shape): this rank's shard of it, or all of it if it is replicated."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            shard = shard_of(target)
            shard.local.copy_(reader.read_slice(name, shard.offset, tuple(shard.local.shape)))
        else:
            target.copy_(reader.read(name))


def read_state_like(name: str, parameter: Tensor | None, reader: CheckpointReader) -> Tensor:
    """Read a tensor of an optimizer's state.

    State with the shape of its parameter is sharded like the parameter. If the parameter is sharded by rows, state with
    the same number of rows is sharded by rows too. Any other state is replicated: every rank reads all of it.
    """
    shape = reader.shape(name)
    if not isinstance(parameter, DTensor) or not shape:
        return reader.read(name)

    # The same shape: a moment, for example.
    shard = shard_of(parameter)
    if shape == tuple(parameter.shape):
        return dtensor_like(reader.read_slice(name, shard.offset, tuple(shard.local.shape)), parameter)

    # The same number of rows: statistics per row, for example.
    if shape[0] == parameter.shape[0] and is_sharded_by_rows(parameter):
        offset = (shard.offset[0], *[0] * (len(shape) - 1))
        size = (len(shard.local), *shape[1:])
        return dtensor_by_rows(reader.read_slice(name, offset, size), parameter, shape)

    return dtensor_by_rows(reader.read(name), parameter, shape, replicate=True)
