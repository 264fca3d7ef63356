"""AdamW whose two moments take one byte per element, and a float32 scale for every block of a row.

A byte is a number in a table of 256 that is dense near 1 and reaches down to 1e-7; the scale is the block's largest
element. Blocks lie inside a row, so that whoever holds a row holds its blocks: a state that was saved on any number of
ranks can be cut anew. Vectors and small matrices keep float32 moments: they are few, and need it most.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.runtime.layout import laid_out, like, local

BLOCK = 256  # elements of a row that share a scale, at most
SMALLEST = 4096  # elements of a parameter from which on its moments are bytes
PIECE = 2**22  # elements that are float32 at once
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # and whether they have a sign


class AdamW8bit(torch.optim.Optimizer):
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
        state = self.state[p]
        if not state:
            state.update(_first_state(p))
        state["step"] += 1
        here, gradient = local(p), local(grad)
        if not here.numel():
            return
        count = float(state["step"])
        if state["exp_avg"].dtype != torch.uint8:
            moments = [local(state[name]) for name in MOMENTS]
            _adamw_(here, gradient, moments, count, group)
            return
        width = here.shape[-1]
        rows, gradients = here.reshape(-1, width), gradient.reshape(-1, width)
        kept = {key: local(value).flatten(0, -2) for key, value in state.items() if key != "step"}
        size = max(1, PIECE // width)
        for start in range(0, len(rows), size):
            piece = slice(start, start + size)
            some = {key: value[piece] for key, value in kept.items()}
            moments = [_from_bytes(some[name], some[f"{name}_scale"], signed) for name, signed in MOMENTS.items()]
            _adamw_(rows[piece], gradients[piece], moments, count, group)
            for (name, signed), moment in zip(MOMENTS.items(), moments, strict=True):
                _to_bytes_(moment, some[name], some[f"{name}_scale"], signed)
        if rows.data_ptr() != here.data_ptr():  # its rows are not one after another: it was a copy
            here.copy_(rows.view(here.shape))


def _first_state(p: Tensor) -> dict[str, Any]:
    here = local(p)
    state: dict[str, Any] = {"step": torch.tensor(0.0)}
    small = p.dim() < 2 or p.numel() < SMALLEST
    for name in MOMENTS:
        zero = 0 if small else int(torch.searchsorted(_table(MOMENTS[name], "cpu"), 0.0))  # which byte means 0
        dtype = torch.float32 if small else torch.uint8
        zeros = torch.full(here.shape, zero, dtype=dtype, device=here.device)  # row by row, whatever `here` is
        state[name] = like(zeros, p) if isinstance(p, DTensor) else zeros
        if not small:
            blocks = -(-p.shape[-1] // BLOCK)
            scales = torch.zeros(*here.shape[:-1], blocks, device=here.device)
            state[f"{name}_scale"] = laid_out(scales, p, (*p.shape[:-1], blocks)) if isinstance(p, DTensor) else scales
    return state


def _adamw_(p: Tensor, grad: Tensor, moments: list[Tensor], count: float, group: dict[str, Any]) -> None:
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    mean, square = moments
    mean.lerp_(grad, 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    length = square.sqrt().div_((1 - beta2**count) ** 0.5).add_(group["eps"])
    p.mul_(1 - lr * group["weight_decay"]).addcdiv_(mean, length, value=-lr / (1 - beta1**count))


# ---- bytes ----------------------------------------------------------------------------------------------


@cache
def _table(signed: bool, device: str) -> Tensor:
    """256 numbers, sorted: 0; half of the rest in (0.1, 1], a quarter in (0.01, 0.1], and so on; negative ones too."""
    decades = 7 if signed else 8
    positive = [
        10.0**-decade * (0.1 + 0.9 * (i + 1) / count)
        for decade in range(decades)
        for count in [2 ** (decades - 1 - decade)]
        for i in range(count)
    ]
    negative = [-value for value in positive] if signed else []
    lowest = [-2.0] if signed else []  # 255 numbers: one byte is never used
    return torch.tensor(sorted([*lowest, *negative, 0.0, *positive]), device=device)


@cache
def _borders(signed: bool, device: str) -> Tensor:
    table = _table(signed, device)
    return (table[1:] + table[:-1]) / 2


def _from_bytes(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """(rows, width) bytes and (rows, blocks) scales to float32."""
    values = _table(signed, str(codes.device))[codes.int()]
    return values.mul_(_spread(scales, codes.shape[-1]))


def _to_bytes_(values: Tensor, codes: Tensor, scales: Tensor, signed: bool) -> None:
    """The opposite; `values` are used up."""
    rows, width = values.shape
    padded = torch.nn.functional.pad(values, (0, scales.shape[-1] * _block(width, scales.shape[-1]) - width))
    scales.copy_(padded.view(rows, scales.shape[-1], -1).abs().amax(-1))
    positive = values > 0
    values.div_(_spread(scales, width).clamp(min=torch.finfo(torch.float32).tiny))
    found = torch.bucketize(values, _borders(signed, str(codes.device)), out_int32=True)
    if not signed:  # a square that is not 0 must not become 0: the update divides by its root
        found.clamp_(min=positive.int())
    codes.copy_(found)


def _spread(scales: Tensor, width: int) -> Tensor:
    """Each scale for all elements of its block: (rows, blocks) to (rows, width)."""
    return scales.repeat_interleave(_block(width, scales.shape[-1]), -1)[:, :width]


def _block(width: int, blocks: int) -> int:
    return -(-width // blocks)
