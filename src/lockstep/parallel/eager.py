"""Eager calls of a model that may be compiled, for inputs whose shape changes with every call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lockstep.parallel.call_chain import CallChain


@contextmanager
def run_eagerly(model: nn.Module) -> Iterator[None]:
    """Run calls of `model` without preparation for their shapes.

    For a new shape torch.compile would compile, a CUDA graph would be captured and cuDNN would plan its attention;
    each takes far longer than the call itself. Hooks still run, so sharded parameters are gathered as usual.
    """
    kernels = torch.backends.cuda
    cudnn_was_on = kernels.cudnn_sdp_enabled()
    # The other attention kernels need no plan. If none of them is enabled, cuDNN has to stay on.
    has_alternative = kernels.flash_sdp_enabled() or kernels.mem_efficient_sdp_enabled() or kernels.math_sdp_enabled()

    kernels.enable_cudnn_sdp(cudnn_was_on and not has_alternative)
    try:
        # The stance reaches submodules that are compiled by themselves.
        with CallChain.of(model).bypassed(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        kernels.enable_cudnn_sdp(cudnn_was_on)
