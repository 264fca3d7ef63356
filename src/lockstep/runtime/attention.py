"""Choose the kernels that `scaled_dot_product_attention` uses.

They are chosen once for the whole run: choosing for every call would take host time, and compiled code keeps the choice
at the time of its compilation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lockstep.config import RunConfig
from lockstep.errors import UserError

# The order on Hopper, which has compute capability 9.0. A call that one kernel cannot handle goes to the next.
BEST = ("cudnn", "flash", "efficient", "math")


def order(asked: str, capability: tuple[int, int] | None, repeatable: bool) -> tuple[str, ...] | None:
    """Return the kernels to try, best first, or None for torch's own choice.

    `capability` is None on a CPU. `repeatable` asks for the same bits in every run, which cuDNN does not guarantee.
    """
    if asked != "auto":
        if capability is None and asked not in ("flash", "math"):
            raise UserError(
                f"attention={asked} needs a GPU",
                "a run on a CPU, where torch has flash and math",
                "leave attention out",
            )

        return (asked,)

    return BEST if capability == (9, 0) and not repeatable else None


@contextmanager
def attention(config: RunConfig, device: torch.device) -> Iterator[None]:
    """Use the configured kernels while the context lasts."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    names = order(config.attention, capability, config.deterministic or config.exact)
    if names is None:
        yield
        return

    # Imported here: most runs leave the choice to torch.
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }

    # torch.compile caches code on disk and in this process. The code contains the kernels that it was compiled for, and
    # torch does not check whether other kernels are chosen now. So the choice becomes part of the key on disk, and a
    # run that chooses by name clears the cache of the process at its beginning and end. (`auto` is the same in every
    # run on a machine.)
    by_name = config.attention != "auto"
    settings = torch.compiler.config
    tag = settings.cache_key_tag

    with sdpa_kernel([kernels[name] for name in names], set_priority=True):
        _forget_compiled(by_name)

        # `settings.patch` cannot be used: it must be left in the same asyncio task in which it was entered.
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


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Use kernels that need no plan while the context lasts: cuDNN makes one for each new shape, in some 100 ms."""
    kernels = torch.backends.cuda
    was_on = kernels.cudnn_sdp_enabled()

    # If no other kernel is enabled, cuDNN has to stay on.
    has_alternative = kernels.flash_sdp_enabled() or kernels.mem_efficient_sdp_enabled() or kernels.math_sdp_enabled()

    # Code that is compiled here must not be found on disk where cuDNN is on, see above.
    settings = torch.compiler.config
    tag = settings.cache_key_tag
    kernels.enable_cudnn_sdp(was_on and not has_alternative)
    settings.cache_key_tag = f"{tag} cudnn={kernels.cudnn_sdp_enabled()}"
    try:
        yield
    finally:
        kernels.enable_cudnn_sdp(was_on)
        settings.cache_key_tag = tag
