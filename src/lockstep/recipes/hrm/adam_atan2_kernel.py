"""The update of Adam-atan2 in one Triton kernel: four tensors are read once and three are written once.

Without it the update is a dozen small kernels, each of which reads and writes all parameters. It is imported only where
Triton is installed and parameters are on a GPU.
"""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor
from triton.language.extra import libdevice  # pyrefly: ignore[missing-import]

BLOCK = 1024  # elements that one program updates


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
    """Update `params`, `means` and `squares` in place. All tensors are contiguous float32.

    Three scalars stay on the device: `correction` is the bias correction of mean / sqrt(square), `divisor` divides the
    gradients, and nothing changes where `skip` is not 0.
    """
    with torch.cuda.device(correction.device):
        for p, grad, mean, square in zip(params, grads, means, squares, strict=True):
            if not p.numel():
                continue

            _update[(triton.cdiv(p.numel(), BLOCK),)](
                p, grad, mean, square, correction, divisor, skip,
                float(lr), 1 - beta1, float(beta2), 1 - beta2, 1 - lr * weight_decay,
                p.numel(), BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip

    # Autograd must notice that these tensors were changed in place.
    torch.autograd.graph.increment_version([*params, *means, *squares])


# No argument may be called `params` or `options`: the code that Triton generates around the kernel has such names.
@triton.jit
def _update(
    weights, grads, means, squares, correction, divisor, skip,
    lr, rest1, beta2, rest2, keep, size, BLOCK: tl.constexpr,
):  # fmt: skip
    # 64-bit offsets: a parameter may have more than 2^31 elements.
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (offset < size) & (tl.load(skip) == 0)

    # The gradient is divided here, so that no kernel of its own is needed.
    grad = tl.load(grads + offset, mask=inside, other=0.0) / tl.load(divisor)
    mean = tl.load(means + offset, mask=inside, other=0.0)
    square = tl.load(squares + offset, mask=inside, other=0.0)
    p = tl.load(weights + offset, mask=inside, other=0.0)

    # Unlike Adam's quotient, atan2 needs no epsilon.
    mean += (grad - mean) * rest1
    square = square * beta2 + grad * grad * rest2
    angle = libdevice.atan2(mean * tl.load(correction), tl.sqrt_rn(square))

    tl.store(means + offset, mean, mask=inside)
    tl.store(squares + offset, square, mask=inside)
    tl.store(weights + offset, p * keep - lr * angle, mask=inside)
