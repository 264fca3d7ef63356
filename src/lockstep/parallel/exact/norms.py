"""Norms that have the same bits whether a tensor is full or sharded along its first dimension.

The order in which a kernel adds the elements of a tensor depends on the tensor's shape. So the norm of each row is
computed separately, and every rank adds the squared norms of all rows in the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def exact_norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the L2 norm of each tensor, which this rank holds in full."""
    return [norm_of_rows(row_norms(tensor)) for tensor in tensors]


def row_norms(tensor: Tensor) -> Tensor:
    """Return the norm of each row of `tensor` (rows, ...), as (rows,) in float64."""
    rows = tensor.detach()

    # A row of a vector is a single number, and a scalar is one row.
    if rows.dim() < 2:
        return rows.abs().double().reshape(-1)

    rows = rows.flatten(1).contiguous()

    # The CPU kernel sums each row separately, in the same way for any number of rows.
    if rows.device.type == "cpu":
        return torch.linalg.vector_norm(rows, dim=1).double()

    return _sum_by_halves(rows.double().square()).sqrt()


def norm_of_rows(norms: Tensor) -> Tensor:
    """Return the norm () of a full tensor from the norms (rows,) of all its rows."""
    return norms.square().sum().sqrt()


def _sum_by_halves(squares: Tensor) -> Tensor:
    """Sum each row of `squares` (rows, columns) by repeatedly adding its two halves.

    The order of a GPU's row sums depends on the number of rows. Elementwise additions do not.
    """
    # Zeros pad the row to a power of two and change no sum.
    width = 1 << (squares.shape[1] - 1).bit_length()
    squares = F.pad(squares, (0, width - squares.shape[1]))
    while width > 1:
        width //= 2
        squares = squares[:, :width] + squares[:, width:]

    return squares[:, 0]
