"""Random numbers as a pure function of whole numbers: (seed, stream, environment, day, ...) -> number.

Nothing is stored and nothing depends on who asks first, so an environment draws the same numbers on whichever rank it
lives, after a resume too. It works on whole tensors of keys at once, on any device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# One stream for each use: no two uses may see the same numbers.
REGIME, RETURN, OFFSET, EXPLORE, ORDER, EPISODE, RANDOM_POLICY, CUE = range(1, 9)

_STRIDE, _FIRST, _SECOND = (  # the 64-bit constants of splitmix64, as signed numbers
    constant - 2**64 for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def hashed(*keys: int | Tensor) -> Tensor:
    """64 bits for every combination of `keys`, which are broadcast against each other."""
    bits = torch.zeros((), dtype=torch.int64)  # as long as it is one number it may meet keys on any device
    for key in keys:
        bits = _mix(bits + _STRIDE + key)
    return bits


def uniform(*keys: int | Tensor) -> Tensor:
    """In [0, 1), float64."""
    return _unsigned_shift(hashed(*keys), 11).double() * 2.0**-53


def normal(*keys: int | Tensor) -> Tensor:
    """Mean 0 and variance 1, float64."""
    radius = torch.sqrt(-2.0 * torch.log1p(-uniform(*keys, 0)))
    return radius * torch.cos(2.0 * math.pi * uniform(*keys, 1))


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _unsigned_shift(bits, 30)) * _FIRST
    bits = (bits ^ _unsigned_shift(bits, 27)) * _SECOND
    return bits ^ _unsigned_shift(bits, 31)


def _unsigned_shift(bits: Tensor, by: int) -> Tensor:
    return (bits >> by) & (2 ** (64 - by) - 1)
