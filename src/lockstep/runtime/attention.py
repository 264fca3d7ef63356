"""Which kernels `scaled_dot_product_attention` uses on a GPU. Set once for the whole run: a choice around every call
would cost time of the host, and what is compiled looks at it only once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def attention(config: RunConfig, device: torch.device) -> Iterator[None]:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    names = order(config.attention, capability, config.deterministic or config.exact)
    if names is None:
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    by_name = config.attention != "auto"
    with sdpa_kernel([kernels[name] for name in names], set_priority=True), _compiled_for(names, by_name):
        yield


@contextmanager
def _compiled_for(names: tuple[str, ...], by_name: bool) -> Iterator[None]:
    """What torch.compile keeps, on disk and in this process, holds the kernels of its day, and torch looks for it
    without asking which ones are wanted now. So the choice becomes part of the key on disk, and whoever chooses by name
    begins and ends with nothing compiled in the process. (`auto` is the same in every run of a machine.)"""
    settings, before = torch.compiler.config, torch.compiler.config.cache_key_tag
    _forget(by_name)
    settings.cache_key_tag = f"{before} attention={','.join(names)}"
    try:
        yield
    finally:
        settings.cache_key_tag = before
        _forget(by_name)


def _forget(compiled: bool) -> None:
    if compiled and "torch._dynamo" in sys.modules:  # without it nothing is compiled; importing it takes seconds
        torch._dynamo.reset()
