"""The kernels that `scaled_dot_product_attention` uses on a GPU.

They are chosen once for the whole run: a choice around every call would take host time, and compiled code looks at
the choice only once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lockstep.config import RunConfig
from lockstep.errors import UserError

HOPPER = (9, 0)

# The order on Hopper: a call that one kernel cannot do goes to the next.
BEST = ("cudnn", "flash", "efficient", "math")


def order(asked: str, capability: tuple[int, int] | None, repeatable: bool) -> tuple[str, ...] | None:
    """Return the kernels to try, best first, or None for torch's own choice.

    `capability` is None on a CPU. `repeatable` asks for the same bits in every run, which cuDNN does not promise.
    """
    if asked != "auto":
        if capability is None and asked not in ("flash", "math"):
            raise UserError(
                f"attention={asked} needs a GPU",
                "a run on a CPU, where torch has flash and math",
                "leave attention out",
            )

        return (asked,)

    return BEST if capability == HOPPER and not repeatable else None


@contextmanager
def attention(config: RunConfig, device: torch.device) -> Iterator[None]:
    """Use the configured kernels while the context lasts."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    names = order(config.attention, capability, config.deterministic or config.exact)
    if names is None:
        yield
        return

    # Imported late: most runs leave the choice to torch.
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    # What torch.compile caches, on disk and in this process, contains the kernels it was compiled for, and torch does
    # not compare them with those wanted now. So the choice becomes part of the key on disk; and a run that chooses by
    # name begins and ends with nothing compiled in the process. (`auto` is the same in every run of a machine.)
    by_name = config.attention != "auto"
    settings = torch.compiler.config
    tag = settings.cache_key_tag
    with sdpa_kernel([kernels[name] for name in names], set_priority=True):
        _forget_compiled(by_name)
        settings.cache_key_tag = f"{tag} attention={','.join(names)}"
        try:
            yield
        finally:
            settings.cache_key_tag = tag
            _forget_compiled(by_name)


def _forget_compiled(by_name: bool) -> None:
    # Before torch._dynamo is imported nothing is compiled, and importing it takes seconds.
    if by_name and "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
