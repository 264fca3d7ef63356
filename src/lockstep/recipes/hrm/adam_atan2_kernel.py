"""The whole update of Adam-atan2 on a GPU, in Triton: each of four tensors is read once, three are written once."""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor
from triton.language.extra import libdevice  # pyrefly: ignore[missing-import]

WIDE, WARPS = 1024, 4  # numbers that a program updates, and its warps


def update_(
    params: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    correction: Tensor,
    divisor: Tensor,
    skip: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    """All contiguous float32. Numbers on the device: the `correction` of mean / sqrt(square) for their start at zero,
    the `divisor` of the gradients, and `skip`: where it is not 0, all stays as it is."""
    with torch.cuda.device(correction.device):
        for p, grad, mean, square in zip(params, grads, means, squares, strict=True):
            if not p.numel():
                continue
            _update[(triton.cdiv(p.numel(), WIDE),)](
                p, grad, mean, square, correction, divisor, skip,
                float(lr), 1 - beta1, float(beta2), 1 - beta2, 1 - lr * weight_decay,
                p.numel(), WIDE=WIDE, num_warps=WARPS,
            )  # fmt: skip
    torch.autograd.graph.increment_version([*params, *means, *squares])


@triton.jit
def _update(  # none of them may be called `params` or `options`: Triton's own code around this one has such names
    weights, grads, means, squares, correction, divisor, skip,
    lr, rest1, beta2, rest2, keep, size, WIDE: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    inside = (place < size) & (tl.load(skip) == 0)
    grad = tl.load(grads + place, mask=inside, other=0.0) / tl.load(divisor)
    mean = tl.load(means + place, mask=inside, other=0.0)
    square = tl.load(squares + place, mask=inside, other=0.0)
    p = tl.load(weights + place, mask=inside, other=0.0)
    mean += (grad - mean) * rest1
    square = square * beta2 + grad * grad * rest2
    angle = libdevice.atan2(mean * tl.load(correction), tl.sqrt_rn(square))
    tl.store(means + place, mean, mask=inside)
    tl.store(squares + place, square, mask=inside)
    tl.store(weights + place, p * keep - lr * angle, mask=inside)
