"""Which attention kernels are tried in which order. That they run is tested in tests/gpu/test_gpu_attention.py."""

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from lockstep.config import resolve
from lockstep.errors import UserError
from lockstep.runtime import context
from lockstep.runtime.attention import BEST, order
from lockstep.runtime.world import World


@pytest.mark.parametrize(
    ("asked", "capability", "repeatable", "expected"),
    [
        ("auto", (9, 0), False, BEST),
        ("auto", (9, 0), True, None),  # cuDNN's do not promise the same bits
        ("auto", (8, 0), False, None),
        ("auto", None, False, None),
        ("efficient", (8, 0), True, ("efficient",)),
        ("math", None, False, ("math",)),
    ],
)
def test_the_order(asked, capability, repeatable, expected):
    assert order(asked, capability, repeatable) == expected


def test_a_run_chooses_and_puts_the_choice_back():
    def chosen():
        return torch.backends.cuda.flash_sdp_enabled(), torch._C._get_sdp_priority_order()

    before, tag = chosen(), torch.compiler.config.cache_key_tag
    with context.start(World(), resolve([("test", {"attention": "math", "device": "cpu"})]).config):
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert chosen() == before
    assert torch.compiler.config.cache_key_tag == tag
    with (
        pytest.raises(UserError, match="leave attention out"),
        context.start(World(), resolve([("test", {"attention": "cudnn", "device": "cpu"})]).config),
    ):
        pass


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("forgets", [True, False], ids=["another process", "this process"])
def test_what_was_compiled_for_other_kernels_is_not_used(forgets):
    """torch keeps compiled code on disk, and finds it again whatever kernels are asked for."""

    def attend(q):
        return F.scaled_dot_product_attention(q, q, q)

    def used(asked):
        with context.start(World(), resolve([("test", {"attention": asked, "device": "cpu"})]).config):
            if forgets:  # leaves what is on disk
                torch._dynamo.reset()
            call, q = torch.compile(attend), torch.ones(1, 2, 8, 4)
            call(q)
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                call(q)
        return "aten::_scaled_dot_product_flash_attention_for_cpu" in {event.key for event in seen.key_averages()}

    assert [used("flash"), used("math"), used("flash")] == [True, False, True]
