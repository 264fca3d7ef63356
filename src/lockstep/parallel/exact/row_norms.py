"""Lengths of tensors that come out the same whether a tensor is whole or cut along its first dimension.

A sum over a whole tensor depends on its shape: kernels add in blocks. So every row gets a length of its own, which does
not depend on how many rows there are, and the lengths of all rows are added, by everybody in the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def row_lengths(tensor: Tensor) -> Tensor:
    """(rows,), in float64."""
    rows = tensor.detach()
    if rows.dim() < 2:
        return rows.abs().double().reshape(-1)
    rows = rows.flatten(1).contiguous()
    if rows.device.type == "cpu":
        return torch.linalg.vector_norm(rows, dim=1).double()
    return _halved(rows.double().square()).sqrt()


def length_of(rows: Tensor) -> Tensor:
    """Of the whole tensor, from the lengths of all its rows."""
    return rows.square().sum().sqrt()


def _halved(squares: Tensor) -> Tensor:
    """The sum of each row, by adding its halves. How a GPU sums up a row depends on the number of rows; this uses
    nothing but additions of single elements."""
    width = 1 << (squares.shape[1] - 1).bit_length()
    squares = F.pad(squares, (0, width - squares.shape[1]))
    while width > 1:
        width //= 2
        squares = squares[:, :width] + squares[:, width:]
    return squares[:, 0]
