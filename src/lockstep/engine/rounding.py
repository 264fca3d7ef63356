"""Stochastic rounding from float32 to bfloat16: up or down at random, so that the mean of many roundings is the number.

The random bits are a function of a key and of the element's place in the whole parameter. Whichever rank holds an
element draws the same bits for it, whatever else it holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.parallel.layout import block_of
from lockstep.runtime.seeds import derive

_LOW = 0xFFFF  # the half of a float32's bits that a bfloat16 does not have


def round_stochastically(values: Tensor, places: Tensor, key: int) -> Tensor:
    """float32 `values` to bfloat16; `places` (int32, as many) say which elements of the whole they are."""
    bits = values.contiguous().view(torch.int32)
    raised = bits + (_mixed(places, key) & _LOW)  # carries into the upper half as often as the lower half is large
    return (raised & ~_LOW).view(torch.float32).to(torch.bfloat16)


def rounding_key(seed: int, step: int, name: str) -> int:
    return derive(seed, f"rounding/{name}", step)


def places_in_whole(parameter: Tensor, device: torch.device) -> Tensor:
    """For each element of this rank's part, its number in the whole parameter, as int32 (large ones wrap around)."""
    if not hasattr(parameter, "to_local"):
        return torch.arange(parameter.numel(), dtype=torch.int32, device=device).view(parameter.shape)
    block = block_of(parameter)  # pyrefly: ignore[bad-argument-type]
    places = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(block.shape))):
        here = torch.arange(block.local.shape[dim], device=device) + block.offset[dim]
        places = places + (here * stride).view(-1, *[1] * (len(block.shape) - 1 - dim))
        stride *= block.shape[dim]
    return places.to(torch.int32).view(block.local.shape)


def _mixed(places: Tensor, key: int) -> Tensor:
    """Each number and the key, scrambled: multiplications spread bits upwards, shifts bring them down again."""
    low, high = _signed(key), _signed(key >> 32)
    mixed = places * _signed(0x9E3779B1) + low
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        mixed = (mixed ^ (mixed >> 15 & 0x1FFFF) ^ high) * _signed(factor)
    return mixed ^ (mixed >> 16 & _LOW)


def _signed(number: int) -> int:
    """Its lower 32 bits, as int32 reads them."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >= 1 << 31 else number
