"""Layers that the transformers of several recipes share: rotary positions, self-attention, gating.

Shapes in comments: B rows, T positions, W width, H heads, D = W / H channels of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rotation = tuple[Tensor, Tensor]  # cosines and sines, (T, D/2) each


def rotation_table(length: int, size: int, device: torch.device | None = None) -> Rotation:
    """Return the rotary angles of `length` positions for heads of `size` channels.

    Position t turns the channel pair j by t * 10000^(-2j/D).
    """
    speed = 10000.0 ** -(torch.arange(0, size, 2, device=device) / size)
    angle = torch.arange(length, device=device)[:, None] * speed
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn the channel pairs (j, j + D/2) of x (..., T, D) by their position, so that q.k depends on distance only."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)  # (..., T, D/2) each

    # The angles are float32; without this conversion the result would be float32 as well.
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def split_qkv(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split the output (B, T, 3W) of a joint projection into queries, keys and values (B, H, T, D)."""
    # Queries, keys and values lie one after another in the channels, and in each of them the heads.
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return q, k, v


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Reshape (B, T, W) to (B, H, T, D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Reshape (B, H, T, D) back to (B, T, W)."""
    return x.transpose(1, 2).flatten(2)


def gated(x: Tensor) -> Tensor:
    """Multiply the second half of the channels by the SiLU of the first half: (..., 2W) to (..., W)."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def rms(x: Tensor, eps: float) -> Tensor:
    """Scale every vector of the last dimension to a root mean square of 1."""
    return F.rms_norm(x, x.shape[-1:], eps=eps)


class SelfAttention(nn.Module):
    """Multi-head self-attention (B, T, W) to (B, T, W) without biases, with rotary positions if a rotation is given.

    With `norm_eps`, queries and keys are normalised: attention cannot saturate, whatever a high learning rate does.
    """

    def __init__(self, width: int, heads: int, causal: bool = False, norm_eps: float | None = None):
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.norm_eps = norm_eps

        # The order of creation fixes the random numbers that a seed gives to each weight.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        q, k, v = split_qkv(self.qkv(x), self.heads)  # (B, H, T, D) each
        if self.norm_eps is not None:
            q = rms(q, self.norm_eps)
            k = rms(k, self.norm_eps)

        if rotation is not None:
            q = rotate(q, rotation)
            k = rotate(k, rotation)

        return self.out(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)))
