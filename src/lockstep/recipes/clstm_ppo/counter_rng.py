"""Random numbers as a pure function of integers: (seed, stream, environment, day, ...) -> number.

This is a counter-based generator. Nothing is stored and the order of calls does not matter, so an environment draws
the same numbers on every rank and after a resume. Keys may be whole tensors, on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

# One stream for each use: no two uses may see the same numbers.
REGIME, RETURN, OFFSET, EXPLORE, ORDER, EPISODE, RANDOM_POLICY, CUE = range(1, 9)

# The 64-bit constants of splitmix64. torch has no unsigned 64-bit arithmetic, so they are written as signed numbers.
_STRIDE = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


def random_bits(*keys: int | Tensor) -> Tensor:
    """Return 64 random bits (int64) for every combination of `keys`, which are broadcast against each other."""
    # A zero-dimensional CPU tensor may be combined with keys on any device.
    bits = torch.zeros((), dtype=torch.int64)
    for key in keys:
        bits = _mix(bits + _STRIDE + key)

    return bits


def uniform(*keys: int | Tensor) -> Tensor:
    """Return uniform numbers in [0, 1), float64."""
    return _unsigned_shift(random_bits(*keys), 11).double() * 2.0**-53


def normal(*keys: int | Tensor) -> Tensor:
    """Return normal numbers with mean 0 and variance 1, float64."""
    # Box and Muller's method: a radius and an angle, each from its own uniform number.
    radius = torch.sqrt(-2.0 * torch.log1p(-uniform(*keys, 0)))
    return radius * torch.cos(2.0 * torch.pi * uniform(*keys, 1))


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _unsigned_shift(bits, 30)) * _FIRST
    bits = (bits ^ _unsigned_shift(bits, 27)) * _SECOND
    return bits ^ _unsigned_shift(bits, 31)


def _unsigned_shift(bits: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift of int64 repeats the sign."""
    return (bits >> by) & (2 ** (64 - by) - 1)
