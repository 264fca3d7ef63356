"""Calls of which hardly one is like another: text that grows word by word, questions of any length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def unprepared(model: nn.Module) -> Iterator[None]:
    """Calls of `model` are carried out as they are written. Every length is a new one: torch.compile would compile for
    it, a recording of kernels would begin, and cuDNN plan its attention, each of which takes far longer than the call.
    The other kernels for attention need no plan. Hooks run, so what is cut over ranks is gathered."""
    kernels, prepared = torch.backends.cuda, model._compiled_call_impl
    was = kernels.cudnn_sdp_enabled()
    another = kernels.flash_sdp_enabled() or kernels.mem_efficient_sdp_enabled() or kernels.math_sdp_enabled()
    kernels.enable_cudnn_sdp(was and not another)
    model._compiled_call_impl = None
    try:
        with torch.compiler.set_stance("force_eager"):  # for parts that are compiled by themselves
            yield
    finally:
        kernels.enable_cudnn_sdp(was)
        model._compiled_call_impl = prepared
