"""Which rank writes what of a checkpoint."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.checkpoint.load import CheckpointReader
from lockstep.checkpoint.saver import Slice
from lockstep.config import RunConfig, flatten
from lockstep.config.values import typed
from lockstep.errors import UserError
from lockstep.runtime.layout import block_of, laid_out, like, only_rows


def merged(everybody: list[dict[str, Any]]) -> dict[str, Any]:
    """The values of all ranks as one. They differ only in whose parameters they hold, and the optimizers state of."""
    first = dict(everybody[0])
    first["model"] = {
        key: {name: kept for values in reversed(everybody) for name, kept in values["model"][key].items()}
        for key in first["model"]
    }
    first["optimizers"] = [
        {**one, "state": {n: kept for values in everybody for n, kept in values["optimizers"][k]["state"].items()}}
        for k, one in enumerate(first["optimizers"])
    ]
    return first


def sizes_of(tensors: dict[str, Tensor]) -> dict[str, int]:
    """The bytes of those that this rank holds whole."""
    return {name: tensor.nbytes for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}


def without_echoes(tensors: dict[str, Tensor], echoes: frozenset[str]) -> dict[str, Tensor]:
    """What is whole on several ranks they share out. Of what is cut everybody saves his part. But of `echoes`,
    parameters by name, and of what an optimizer keeps for them somebody else has the same part."""

    def is_echo(key: str, tensor: Tensor) -> bool:
        own = key.removeprefix("model.") if key.startswith("model.") else key.split(".", 2)[-1].rpartition(".")[0]
        return isinstance(tensor, DTensor) and own in echoes

    return {key: tensor for key, tensor in tensors.items() if not is_echo(key, tensor)} if echoes else tensors


def share_out(tensors: dict[str, Tensor], rank: int, everybody: list[dict[str, int]]) -> list[Slice]:
    """What is cut, every rank writes its part of. What several ranks hold, they share: about equally many bytes each.

    `everybody`: the names and bytes of the tensors that each rank holds whole.
    """
    holders: dict[str, list[int]] = {}
    for holder, sizes in enumerate(everybody):
        for name in sizes:
            holders.setdefault(name, []).append(holder)
    loads = [0] * len(everybody)
    mine = []
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            block = block_of(tensor)
            if block.first_copy and block.local.numel():
                mine.append(Slice(name, block.local, block.shape, block.offset))
    bytes_of = {name: size for one in everybody for name, size in one.items()}
    for name, size in sorted(bytes_of.items(), key=lambda item: (-item[1], item[0])):
        # What the user keeps beside the model may differ between ranks: rank 0's is saved, all of it.
        writer = 0 if name.startswith("part.") else min(holders[name], key=lambda holder: (loads[holder], holder))
        loads[writer] += size
        if writer == rank:
            mine.append(Slice.whole(name, tensors[name]))
    return mine


# What this rank needs of a saved tensor, and nothing else, is read.


def fill(target: Tensor, name: str, reader: CheckpointReader) -> None:
    """This rank's part of `target`."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            block = block_of(target)
            block.local.copy_(reader.read_block(name, block.offset, tuple(block.local.shape)))
        else:
            target.copy_(reader.read(name))


def read_beside(name: str, parameter: Tensor | None, reader: CheckpointReader) -> Tensor:
    """A tensor of an optimizer's state. It is cut as its parameter is, if it has its shape or, where that is cut by
    rows, its rows; otherwise every rank has all of it."""
    shape = reader.shape(name)
    if not isinstance(parameter, DTensor) or not shape:
        return reader.read(name)
    block = block_of(parameter)
    if shape == tuple(parameter.shape):
        return like(reader.read_block(name, block.offset, tuple(block.local.shape)), parameter)
    if shape[0] == parameter.shape[0] and only_rows(parameter):
        offset, size = (block.offset[0], *[0] * (len(shape) - 1)), (len(block.local), *shape[1:])
        return laid_out(reader.read_block(name, offset, size), parameter, shape)
    return laid_out(reader.read(name), parameter, shape, whole=True)


# What is not as it was when a checkpoint was written.


NOT_COMPARED = ("run_dir", "resume", "log.progress")  # may change between two parts of a run without a word


class Change(NamedTuple):
    key: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.now}"


def as_saved(config: RunConfig) -> dict[str, str]:
    """What a checkpoint keeps of it: every setting as one would type it."""
    return {key: typed(value) for key, value in flatten(config).items()}


def config_changes(saved: dict[str, str], config: RunConfig) -> list[Change]:
    now = as_saved(config)
    keys = [key for key in {**saved, **now} if key not in NOT_COMPARED and saved.get(key) != now.get(key)]
    return [Change(key, saved.get(key, "not set"), now.get(key, "not set")) for key in keys]


def check_lasting(settings: list[Change], lasting: set[str]) -> None:
    """The task said that its own state goes with these settings."""
    for key, before, now in settings:
        if key in lasting:
            raise UserError(
                f"to go on with {key}={now}",
                f"a run with {key}={before}, and the state that its task has saved goes with that",
                f"type {key}={before}, or start a new run from the exported weights",
            )
