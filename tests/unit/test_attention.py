"""Which attention kernels are tried in which order. That they run is tested in tests/gpu/test_attention.py."""

import pytest
import torch

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

    before = chosen()
    with context.start(World(), resolve([("test", {"attention": "math", "device": "cpu"})]).config):
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert chosen() == before
    with (
        pytest.raises(UserError, match="leave attention out"),
        context.start(World(), resolve([("test", {"attention": "cudnn", "device": "cpu"})]).config),
    ):
        pass
