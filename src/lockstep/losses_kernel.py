"""The row-wise part of `losses.linear_cross_entropy` on a GPU: one read and one write of the logits, in Triton."""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

WIDE, WARPS = 4096, 8  # logits that a program holds at a time, and its warps


def row_losses_(logits: Tensor, targets: Tensor, losses: Tensor, ignore_index: int, gradient: bool) -> None:
    """Fill `losses` (N,), float32; with `gradient`, put d loss / d logits where the logits (N, V) were.

    A target outside the vocabulary gives nan for all of them, so that no step applies it.
    """
    rows, columns = logits.shape
    if not rows:
        return
    with torch.cuda.device(logits.device):
        _row_loss[(rows,)](
            logits,
            targets,
            losses,
            logits.stride(0),
            columns,
            ignore_index,
            WIDE=WIDE,
            GRADIENT=gradient,
            num_warps=WARPS,
        )


@triton.jit
def _row_loss(logits, targets, losses, stride, columns, ignored, WIDE: tl.constexpr, GRADIENT: tl.constexpr):
    """One row. The second pass finds most of what the first has read in the cache."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    kept = target != ignored
    valid = (target >= 0) & (target < columns)
    lane = tl.arange(0, WIDE)
    right = tl.load(logits + tl.where(valid, target, 0)).to(tl.float32)  # before anything is overwritten
    top = -1e30
    total = tl.zeros([WIDE], tl.float32)  # per lane, of exp(logit - top)
    for start in range(0, columns, WIDE):
        x = tl.load(logits + start + lane, mask=start + lane < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    log_sum = tl.where(valid, top + tl.log(tl.sum(total, 0)), float("nan"))
    tl.store(losses + row, tl.where(kept, log_sum - right, 0.0))
    if GRADIENT:
        for start in range(0, columns, WIDE):
            inside = start + lane < columns
            x = tl.load(logits + start + lane, mask=inside, other=-float("inf")).to(tl.float32)
            slope = tl.exp(x - log_sum) - tl.where(start + lane == target, 1.0, 0.0)
            slope = tl.where(kept, slope, 0.0)
            tl.store(logits + start + lane, slope.to(logits.dtype.element_ty), mask=inside)
