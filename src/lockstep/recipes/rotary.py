"""Rotary positions, for the recipes whose attention has them.

Shapes in comments: T positions, D channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]


def rotation_table(length: int, size: int, device: torch.device | None = None) -> Rotation:
    """Cosines and sines (T, D/2): position t turns pair j by t * 10000^(-2j/D)."""
    speed = 10000.0 ** -(torch.arange(0, size, 2, device=device) / size)
    angle = torch.arange(length, device=device)[:, None] * speed
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn the pairs (x[j], x[j + D/2]) by their position, so that a product q.k depends on distance only."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)  # (..., T, D/2) each
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
