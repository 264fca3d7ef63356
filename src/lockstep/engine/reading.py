"""What this rank needs of a saved tensor, and nothing else, is read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.checkpoint.load import Reader
from lockstep.parallel.layout import block_of, laid_out, like, only_rows


def fill(target: Tensor, name: str, reader: Reader) -> None:
    """This rank's part of `target`."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            block = block_of(target)
            block.local.copy_(reader.read_block(name, block.offset, tuple(block.local.shape)))
        else:
            target.copy_(reader.read(name))


def read_beside(name: str, parameter: Tensor | None, reader: Reader) -> Tensor:
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
