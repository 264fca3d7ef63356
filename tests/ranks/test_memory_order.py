"""Parameters that do not lie in memory in the order of their indices: channels_last, transposed.

Fused optimizers go through the memory of parameters, gradients and moments without a look at their strides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.runtime.shards import in_memory_order_of
from pool import Pool
from ranks.support import Regression, assert_user_errors, fit

VALUES = {"global_batch": 8, "micro_batch": 2, "steps": 6, "lr.schedule": "constant", "checkpoint.at_end": True}
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"strategy": "zero1"},
    "unused": {"ddp.find_unused_parameters": True},
    "masters": {"precision": "bf16-master"},
}


class Laid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.mix = nn.Parameter(torch.randn(15, 5).t())
        self.out = nn.Linear(5, 1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 1, 5, 1).to(memory_format=torch.channels_last)
        x = self.second(torch.tanh(self.first(x))).flatten(1)
        return self.out(torch.tanh(x @ self.mix.t())).squeeze(-1).float()


class Fused(Regression):
    def __init__(self) -> None:
        super().__init__(network=Laid)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)


@pytest.mark.parametrize("way", WAYS)
def test_several_ranks_are_one(pool: Pool, way: str) -> None:
    values = VALUES | WAYS[way]
    (alone,) = pool.run(fit, Fused(), {key: v for key, v in values.items() if key != "strategy"}, world=1)
    rounding = 1e-2 if "precision" in values else 1e-5
    for trace in pool.run(fit, Fused(), values, world=2):
        torch.testing.assert_close(trace.steps[-1].weights, alone.steps[-1].weights, rtol=rounding, atol=rounding)


@pytest.mark.parametrize(("way", "world"), [("ddp", 1), ("zero1", 2), ("masters", 2)])
def test_a_resume_changes_no_bit(pool: Pool, tmp_path: Path, way: str, world: int) -> None:
    """A checkpoint holds the moments in the order of indices."""
    values = VALUES | WAYS[way] | {"run_dir": str(tmp_path / "run")}
    whole, *_ = pool.run(fit, Fused(), values | {"run_dir": str(tmp_path / "whole")}, world=world)
    pool.run(fit, Fused(), values | {"steps": 3}, world=world)
    resumed, *_ = pool.run(fit, Fused(), values | {"resume": "auto"}, world=world)
    torch.testing.assert_close(resumed.steps[-1].weights, whole.steps[-1].weights, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("network", "words"),
    [(Laid, ("'mix'", "is not contiguous")), (lambda: Empty(), ("'nothing'", "no elements"))],
    ids=["laid", "empty"],
)
def test_fsdp_names_what_it_cannot_shard(pool: Pool, network: Any, words: tuple[str, ...]) -> None:
    errors = pool.errors(fit, Regression(network=network), VALUES | {"strategy": "fsdp"}, world=2)
    assert_user_errors(errors, *words, "strategy=ddp")


class Empty(Laid):
    def __init__(self) -> None:
        super().__init__()
        self.to(memory_format=torch.contiguous_format)
        self.mix = nn.Parameter(torch.randn(5, 15))
        self.nothing = nn.Parameter(torch.empty(0))


def test_in_memory_order_of() -> None:
    laid = torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last)
    values = torch.randn(4, 3, 2, 2)
    found = in_memory_order_of(laid, values)
    assert found.stride() == laid.stride()
    assert torch.equal(found, values)

    # What lies in the same order already is not copied.
    assert in_memory_order_of(torch.empty(4, 3, 2, 2), values) is values
    assert in_memory_order_of(laid, found) is found
    assert in_memory_order_of(torch.empty(4, 6)[:, ::2], values.view(16, 3)[:4]).is_contiguous()

    # One element along a dimension: any stride is contiguous there, but a GPU's kernels compare them.
    single = torch.empty(4, 1, 3, 3).to(memory_format=torch.channels_last)
    assert in_memory_order_of(single, torch.empty(4, 1, 3, 3)).stride() == single.stride()
