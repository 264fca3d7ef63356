"""Which kernels `scaled_dot_product_attention` uses on a GPU. Set once for the whole run: a choice around every call
would cost time of the host, and what is compiled looks at it only once."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lockstep.config import RunConfig
from lockstep.errors import UserError

HOPPER = (9, 0)
BEST = ("cudnn", "flash", "efficient", "math")  # on Hopper; what a kernel cannot do, the next one does


def order(asked: str, capability: tuple[int, int] | None, repeatable: bool) -> tuple[str, ...] | None:
    """The kernels to try, best first; None: torch's own choice. `capability`: None on a CPU; `repeatable`: the same
    bits in every run, which cuDNN's do not promise."""
    if asked != "auto":
        if capability is None and asked not in ("flash", "math"):
            raise UserError(f"attention={asked}", "a CPU, where torch has flash and math", "leave attention out")
        return (asked,)
    return BEST if capability == HOPPER and not repeatable else None


def attention(config: RunConfig, device: torch.device) -> AbstractContextManager[Any]:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    names = order(config.attention, capability, config.deterministic or config.exact)
    if names is None:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    return sdpa_kernel([kernels[name] for name in names], set_priority=True)
