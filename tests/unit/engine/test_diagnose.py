"""torch's errors in our words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction

from lockstep.config import RunConfig
from lockstep.engine.diagnose import explained
from lockstep.errors import UserError
from lockstep.parallel.exact.block_inputs import group_input_gradients

EXACT = RunConfig(global_batch=4, steps=1, exact=True)
SHARDED = RunConfig(global_batch=4, steps=1, strategy="fsdp")


class Doubling(nn.Module):
    """A block that changes its only input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(2))


class Changing(nn.Module):
    """A block that changes the first of its two inputs in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x += memory
        return self.linear(x)


def failing(config: RunConfig, x: Tensor) -> None:
    builder: Any = SimpleNamespace(config=config, driver=None)
    block = Changing()
    with explained(builder):
        if config.exact:
            group_input_gradients(block, config)
            block(x, x * 2)
        else:
            block(*RegisterPostBackwardFunction.apply(None, x, x * 2))


@pytest.mark.parametrize(("config", "setting"), [(EXACT, "exact=true"), (SHARDED, "strategy=fsdp")])
def test_a_block_that_changes_an_input_in_place(config: RunConfig, setting: str) -> None:
    with pytest.raises(UserError, match=f"{setting} cannot be used with a block that changes its input") as caught:
        failing(config, torch.ones(2, 3, requires_grad=True) * 1)
    assert "x = x + y instead of x += y" in str(caught.value)


def test_the_only_input_of_a_block_with_both_nodes() -> None:
    """Exact mode under fsdp: FSDP's node outside, that of exact mode inside."""
    driver = SimpleNamespace(role=SimpleNamespace(replicated=False))
    builder: Any = SimpleNamespace(config=EXACT, driver=driver)
    block = Doubling()
    group_input_gradients(block, EXACT)
    (x,) = RegisterPostBackwardFunction.apply(None, torch.ones(2, 3, requires_grad=True) * 1)
    problem = "exact=true cannot be used with a block that changes its input"
    with pytest.raises(UserError, match=problem), explained(builder):
        block(x)


# What torch says of it, by its version.
MESSAGES = {
    "2.11": "Output 0 of ViewBackward0 is a view and is being modified inplace. This view was created inside a custom "
    "Function (or because an input was returned as-is) and the autograd logic to handle view+inplace would override "
    "the custom backward associated with the custom Function, leading to incorrect gradients.",
    "2.13": "Output 0 of View is a view and is being modified inplace. This view was created inside a custom Function.",
}


@pytest.mark.parametrize("version", MESSAGES)
def test_the_words_of_every_torch(version: str) -> None:
    error = RuntimeError(MESSAGES[version])
    builder: Any = SimpleNamespace(config=EXACT, driver=SimpleNamespace(role=SimpleNamespace(replicated=False)))
    problem = "exact=true cannot be used with a block that changes its input"
    with pytest.raises(UserError, match=problem), explained(builder):
        raise error

    # Where nothing is sharded, the view is the user's own.
    builder.driver.role.replicated = True
    with pytest.raises(RuntimeError, match="is a view"), explained(builder):
        raise error
