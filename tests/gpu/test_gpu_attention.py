"""The kernels that were asked for run, compiled or not, and a run leaves torch's own choice as it was."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from lockstep.config import resolve
from lockstep.runtime import context
from lockstep.runtime.world import World

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: run it on one, see CONTRIBUTING.md")

KERNELS = {
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "flash": "_scaled_dot_product_flash_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
    "math": "_scaled_dot_product_attention_math",
}


def used(compiled: bool) -> str:
    """By what the profiler sees the host call. Code that an earlier run has compiled may not be used for this one:
    nothing here makes torch forget it."""

    def attend(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    call = torch.compile(attend) if compiled else attend
    q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
    call(q)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call(q)
    names = {event.key for event in seen.key_averages()}
    found = [name for name, op in KERNELS.items() if f"aten::{op}" in names]
    # Compiled, `math` is matrix products and a softmax of torch's own making: whatever has one of the others' names is
    # not that.
    others = [name for name in names if "flash" in name.lower() or "cudnn" in name.lower() or "fmha" in name.lower()]
    return found[0] if found else "math" if not others else f"neither: {others}"


@pytest.mark.parametrize("asked", KERNELS)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_kernels_that_were_asked_for(asked: str, compiled: bool) -> None:
    before = torch._C._get_sdp_priority_order()
    with context.start(World(), resolve([("test", {"attention": asked})]).config):
        assert used(compiled) == asked
    assert torch._C._get_sdp_priority_order() == before


def test_without_a_word() -> None:
    hopper = torch.cuda.get_device_capability() == (9, 0)
    with context.start(World(), resolve([]).config):
        assert not hopper or used(False) == "cudnn"
    with context.start(World(), resolve([("test", {"deterministic": True})]).config):
        assert used(False) == "flash"
