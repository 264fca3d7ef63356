"""Which rank writes what of a checkpoint."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.checkpoint.save import Slice
from lockstep.parallel.layout import block_of


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
