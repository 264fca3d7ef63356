"""Which tensors and shards each rank writes and reads. A checkpoint can be loaded on any number of ranks.

A DTensor is sharded: every rank writes its shard, and reads the slice of the full tensor that it holds now. Any other
tensor is replicated: one of the ranks that hold it writes it, and all ranks that need it read it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.state.encoding import CapturedTensor
from lockstep.errors import UserError
from lockstep.runtime.shards import (
    LocalShard,
    balance,
    dtensor_by_rows,
    dtensor_like,
    is_first_copy,
    is_sharded_by_rows,
    shard_of,
)


@dataclass(frozen=True)
class ParameterHolders:
    """Which ranks hold the parameters of a model. By default every rank holds all of them."""

    # Parameters that the model of this rank has by name, but that only other ranks hold: in a pipeline.
    held_elsewhere: Collection[str] = ()

    # Whether no rank lacks a parameter.
    all_on_every_rank: bool = True

    # Parameters whose identical shard a lower rank also holds, so that this rank need not write them.
    duplicates: Collection[str] = ()


# ---- writing ----


class Rank0Contents(NamedTuple):
    """What rank 0 writes to the manifest besides the files and their tensors. It must not change meanwhile."""

    # For tied tensors: other name -> name among the shards.
    aliases: Mapping[str, str] = {}

    # `Manifest.values`, encoded by `encoding.pack`.
    values: Mapping[str, Any] = {}


class RankContents(NamedTuple):
    """What one rank writes to a checkpoint. Nothing is copied yet."""

    # The shards that this rank writes, by tensor name.
    shards: Mapping[str, LocalShard]

    # Unused on other ranks.
    of_rank0: Rank0Contents = Rank0Contents()

    # The names of tensors to copy while training continues; they must not change before `Save.wait_for_copy`.
    copy_later: Collection[str] = ()


def replicated_sizes(tensors: Mapping[str, CapturedTensor]) -> dict[str, int]:
    """Return the bytes of the replicated tensors that this rank holds, except the tensors that only rank 0 writes."""
    return {
        name: captured.tensor.nbytes
        for name, captured in tensors.items()
        if not isinstance(captured.tensor, DTensor) and captured.stateful is None
    }


def shards_to_write(
    tensors: Mapping[str, CapturedTensor],
    rank: int,
    sizes: list[dict[str, int]],
    duplicates: Collection[str] = (),
) -> dict[str, LocalShard]:
    """Return what this rank writes: its shards, and some of the replicated tensors, balanced by bytes.

    `sizes` holds the `replicated_sizes` of each rank.
    `duplicates`: see `ParameterHolders`.
    """
    # Every rank computes the writers of all replicated tensors.
    writers = _writers(sizes)

    def writes(name: str, captured: CapturedTensor) -> bool:
        tensor = captured.tensor
        if isinstance(tensor, DTensor):
            # Of several ranks with the same shard, the first on the mesh writes it. Pipeline stages are on different
            # meshes, so `duplicates` lists the parameters whose shard a lower stage writes.
            first = is_first_copy(tensor) and captured.parameter not in duplicates

            # An empty shard needs no file, unless all shards are empty: the manifest must still list the tensor.
            return first and (tensor.to_local().numel() > 0 or tensor.numel() == 0)

        # The ranks may have different values of a stateful object's tensor: rank 0's is saved.
        writer = writers[name] if captured.stateful is None else 0
        return writer == rank

    return {name: shard_of(captured.tensor) for name, captured in tensors.items() if writes(name, captured)}


def _writers(sizes: list[dict[str, int]]) -> dict[str, int]:
    """Return the rank that writes each replicated tensor. The result is the same on every rank."""
    size_of = {name: size for rank_sizes in sizes for name, size in rank_sizes.items()}
    names = sorted(size_of)
    holders = [[rank for rank, rank_sizes in enumerate(sizes) if name in rank_sizes] for name in names]
    return dict(zip(names, balance([size_of[name] for name in names], holders), strict=True))


# ---- reading ----


def read_into(target: Tensor, name: str, reader: CheckpointReader) -> None:
    """Read the tensor `name` into `target`: this rank's shard of it, or all of it if it is replicated.

    Raise a UserError if the tensor was saved with another shape. A slice of it would fit, with the wrong elements.
    """
    shard = shard_of(target)
    saved = reader.shape(name)
    if saved != shard.full_shape:
        raise different_model_error(f"{name!r} has shape {saved} in the checkpoint and {shard.full_shape} in this run")

    with torch.no_grad():
        shard.local.copy_(reader.read_slice(name, shard.offset, shard.local.shape))


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
        return dtensor_like(reader.read_slice(name, shard.offset, shard.local.shape), parameter)

    # The same number of rows: statistics per row, for example.
    if shape[0] == parameter.shape[0] and is_sharded_by_rows(parameter):
        offset = (shard.offset[0], *[0] * (len(shape) - 1))
        size = (len(shard.local), *shape[1:])
        return dtensor_by_rows(reader.read_slice(name, offset, size), parameter, shape)

    return dtensor_by_rows(reader.read(name), parameter, shape, replicate=True)


def different_model_error(found: str) -> UserError:
    """Return the error for a checkpoint of another model. `found` is the first difference."""
    return UserError(
        "the model differs from the model in the checkpoint",
        found,
        "restore the task and its options as they were, or start a new run (leave --resume out)",
    )
