"""AdamW whose two moments take one byte per element, plus a float32 scale per block of a row.

This is block-wise dynamic quantization (Dettmers et al., 2022): a byte is an index into a table of 256 numbers, which
is dense near 1 and reaches down to 1e-7. The scale is the largest absolute value of the block. A block never crosses
rows, so a rank that holds a row holds its blocks, and a state that was saved on any number of ranks can be resharded.
Vectors and small matrices keep float32 moments: they are few, and most sensitive to rounding.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lockstep.runtime.shards import dtensor_by_rows, dtensor_like, to_local

BLOCK = 256  # at most this many elements of a row share a scale
MIN_ELEMENTS = 4096  # parameters with fewer elements keep float32 moments
CHUNK_ELEMENTS = 2**22  # an update converts the moments of this many elements to float32 at a time
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # name -> whether it is signed


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with 8-bit moments, for plain parameters and for parameters that FSDP shards by rows.

    It takes the same arguments as torch's AdamW.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter, or this rank's shard of it."""
        state = self.state[p]
        if not state:
            state.update(_first_state(p))

        state["step"] += 1

        shard = to_local(p)
        count = float(state["step"])
        if not shard.numel():
            return  # a rank may hold no row of a small parameter

        if state["exp_avg"].dtype == torch.uint8:
            _update_8bit(shard, to_local(grad), state, count, group)
        else:
            _adamw_(shard, to_local(grad), [to_local(state[name]) for name in MOMENTS], count, group)


def _update_8bit(shard: Tensor, grad: Tensor, state: dict[str, Any], count: float, group: dict[str, Any]) -> None:
    """Update this rank's rows, about CHUNK_ELEMENTS elements at a time, which bounds the memory for float32 moments.

    shard, grad: (..., width), with two or more dimensions.
    """
    width = shard.shape[-1]
    rows = shard.reshape(-1, width)
    gradients = grad.reshape(-1, width)
    stored = {key: to_local(value).flatten(0, -2) for key, value in state.items() if key != "step"}

    size = max(1, CHUNK_ELEMENTS // width)
    for start in range(0, len(rows), size):
        chunk = slice(start, start + size)

        # Views of the bytes and scales of these rows. `_to_bytes_` writes into them.
        views = {key: value[chunk] for key, value in stored.items()}
        moments = [_from_bytes(views[name], views[f"{name}_scale"], signed) for name, signed in MOMENTS.items()]
        _adamw_(rows[chunk], gradients[chunk], moments, count, group)
        for (name, signed), moment in zip(MOMENTS.items(), moments, strict=True):
            _to_bytes_(moment, views[name], views[f"{name}_scale"], signed)

    # If rows are not contiguous in memory, as with channels_last, `rows` is a copy.
    if rows.data_ptr() != shard.data_ptr():
        shard.copy_(rows.view(shard.shape))


def _first_state(p: Tensor) -> dict[str, Any]:
    """Return moments of zero: bytes and scales for large parameters, float32 for small ones.

    The size of the full tensor decides, not that of the shard, so that it is the same on any number of ranks.
    """
    state: dict[str, Any] = {"step": torch.tensor(0.0)}
    if p.dim() < 2 or p.numel() < MIN_ELEMENTS:
        return state | {name: _filled(p, 0, torch.float32) for name in MOMENTS}

    shard = to_local(p)
    blocks = -(-p.shape[-1] // BLOCK)
    for name, signed in MOMENTS.items():
        # The byte for 0 depends on the table.
        zero = int(torch.searchsorted(_table(signed, "cpu"), 0.0))
        state[name] = _filled(p, zero, torch.uint8)
        # One scale for each block of a row, placed like the rows.
        scales = torch.zeros(*shard.shape[:-1], blocks, device=shard.device)
        state[f"{name}_scale"] = dtensor_by_rows(scales, p, (*p.shape[:-1], blocks))

    return state


def _filled(p: Tensor, value: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor filled with `value`, with the shape and placement of `p`, always in row-major order."""
    shard = to_local(p)
    return dtensor_like(torch.full(shard.shape, value, dtype=dtype, device=shard.device), p)


def _adamw_(p: Tensor, grad: Tensor, moments: list[Tensor], count: float, group: dict[str, Any]) -> None:
    """Apply AdamW in place. All tensors have the same shape; `count` is the number of the step, from 1."""
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    mean, square = moments

    # The moments, and the bias correction of the second one.
    mean.lerp_(grad, 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = square.sqrt().div_((1 - beta2**count) ** 0.5).add_(group["eps"])

    # Decoupled weight decay, then the step with the bias correction of the first moment.
    p.mul_(1 - lr * group["weight_decay"])
    p.addcdiv_(mean, denominator, value=-lr / (1 - beta1**count))


@cache
def _table(signed: bool, device: str) -> Tensor:
    """Return 256 sorted numbers: 0, then half of the rest in (0.1, 1], a quarter in (0.01, 0.1], and so on.

    With `signed` there is a negative number for each positive one.
    """
    decades = 7 if signed else 8
    positive: list[float] = []
    for decade in range(decades):
        count = 2 ** (decades - 1 - decade)
        positive += [10.0**-decade * (0.1 + 0.9 * (i + 1) / count) for i in range(count)]

    if not signed:
        return torch.tensor(sorted([0.0, *positive]), device=device)

    # With their negatives these are 255 numbers: -2, the lowest, fills the table and is never used.
    return torch.tensor(sorted([-2.0, *(-value for value in positive), 0.0, *positive]), device=device)


@cache
def _borders(signed: bool, device: str) -> Tensor:
    table = _table(signed, device)
    return (table[1:] + table[:-1]) / 2


def _from_bytes(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Return float32 values for codes (rows, width) and scales (rows, blocks)."""
    return _table(signed, str(codes.device))[codes.int()].mul_(_spread(scales, codes.shape[-1]))


def _to_bytes_(values: Tensor, codes: Tensor, scales: Tensor, signed: bool) -> None:
    """Write values (rows, width) into codes (rows, width) and scales (rows, blocks). The values are used up."""
    # The scale is the block's largest absolute value. Padding with zeros does not change it.
    rows, width = values.shape
    blocks = scales.shape[-1]
    padded = torch.nn.functional.pad(values, (0, blocks * _block(width, blocks) - width))
    scales.copy_(padded.view(rows, blocks, -1).abs().amax(-1))

    # Compared before the division, which may round a small value to 0.
    positive = values > 0
    values.div_(_spread(scales, width).clamp(min=torch.finfo(torch.float32).tiny))
    indices = torch.bucketize(values, _borders(signed, str(codes.device)), out_int32=True)
    if not signed:
        # A nonzero second moment must not become 0, because the update divides by its root.
        indices.clamp_(min=positive.int())

    codes.copy_(indices)


def _spread(scales: Tensor, width: int) -> Tensor:
    """Repeat each scale for all elements of its block: (rows, blocks) -> (rows, width)."""
    return scales.repeat_interleave(_block(width, scales.shape[-1]), -1)[:, :width]


def _block(width: int, blocks: int) -> int:
    """Return the number of elements per block. All blocks of a row have the same length, except the last."""
    return -(-width // blocks)
