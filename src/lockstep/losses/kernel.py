"""The row-wise part of `linear_cross_entropy` on a GPU, in Triton: it reads and writes the logits in memory once.

Plain torch reads or writes them about six times, which dominates the step of a small model.
"""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

WIDTH = 4096  # logits per iteration of a program
WARPS = 8


def row_losses_(logits: Tensor, targets: Tensor, losses: Tensor, ignore_index: int, gradient: bool) -> None:
    """Fill `losses` (N,), float32; with `gradient`, overwrite the logits (N, V) with d loss / d logits.

    A target outside the vocabulary makes the loss nan, so that the step is skipped.
    """
    rows, columns = logits.shape
    if not rows:
        return

    # Triton launches on the current device, which may not be the device of the tensors.
    with torch.cuda.device(logits.device):
        _row_loss[(rows,)](
            logits,
            targets,
            losses,
            logits.stride(0),
            columns,
            ignore_index,
            WIDTH=WIDTH,
            GRADIENT=gradient,
            num_warps=WARPS,
        )


@triton.jit
def _row_loss(logits, targets, losses, stride, columns, ignored, WIDTH: tl.constexpr, GRADIENT: tl.constexpr):
    """Compute one row. The second pass finds most of the row in the cache."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    counted = target != ignored
    valid = (target >= 0) & (target < columns)
    lane = tl.arange(0, WIDTH)
    target_logit = tl.load(logits + tl.where(valid, target, 0)).to(tl.float32)  # before it is overwritten

    # An online log-sum-exp: the sum is rescaled whenever a larger logit appears.
    largest = -1e30
    total = tl.zeros([WIDTH], tl.float32)  # per lane, the sum of exp(logit - largest)
    for start in range(0, columns, WIDTH):
        x = tl.load(logits + start + lane, mask=start + lane < columns, other=-float("inf")).to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - new_largest) + tl.exp(x - new_largest)
        largest = new_largest

    log_sum = tl.where(valid, largest + tl.log(tl.sum(total, 0)), float("nan"))
    tl.store(losses + row, tl.where(counted, log_sum - target_logit, 0.0))

    # softmax(logits) - one_hot(target), in place.
    if GRADIENT:
        for start in range(0, columns, WIDTH):
            inside = start + lane < columns
            x = tl.load(logits + start + lane, mask=inside, other=-float("inf")).to(tl.float32)
            slope = tl.exp(x - log_sum) - tl.where(start + lane == target, 1.0, 0.0)
            slope = tl.where(counted, slope, 0.0)
            tl.store(logits + start + lane, slope.to(logits.dtype.element_ty), mask=inside)
