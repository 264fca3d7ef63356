"""A mean in place of the sum is refused in the first `step.backward` of a custom loop, and no sum is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.engine.checks.mean_loss import find_mean
from lockstep.errors import UserError

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 4

Loss = Callable[[Tensor], Tensor]

MEANS: list[Loss] = [
    lambda x: F.cross_entropy(x, Y),
    lambda x: F.cross_entropy(x, Y) / 4,
    lambda x: -F.log_softmax(x, 1).mean(),
    lambda x: F.mse_loss(x, X).double(),
    lambda x: x.square().sum(1).mean(0),
    lambda x: F.l1_loss(x, X * 2).squeeze(),
    lambda x: F.binary_cross_entropy_with_logits(x, (X > 0).float()) / torch.tensor(2.0),
]
SUMS: list[Loss] = [
    lambda x: F.cross_entropy(x, Y, reduction="sum"),
    lambda x: F.cross_entropy(x, Y) * len(Y),
    lambda x: len(Y) * F.cross_entropy(x, Y),
    lambda x: F.cross_entropy(x, Y) * torch.tensor(8),
    lambda x: (F.cross_entropy(x, Y) * len(Y)).double() / 4,
    lambda x: F.cross_entropy(x, Y) / (1 / len(Y)),
    lambda x: x.square().mean(1).sum(),
    lambda x: x[0].square().sum().reshape(1).mean(),
    lambda x: F.mse_loss(x[0, :1], X[0, :1] * 2),
    lambda x: x.square().sum() / 8,
    lambda x: x.mean() / x.sum(),
    lambda x: x.square().sum(0).mean(),
    lambda x: x.square().sum(-2).mean(),
    lambda x: torch.stack([x.square().sum(), x.sum()]).mean(),
]


def leaf() -> Tensor:
    return X.clone().requires_grad_()


@pytest.mark.parametrize("loss", MEANS)
def test_a_mean_is_found(loss: Loss) -> None:
    for weight in (8, 8.0, torch.tensor(8)):
        cause = find_mean(loss(leaf()), weight)
        assert cause
        assert cause.key == "mean-for-sum"
        assert "weight=8" in cause.evidence

    # A weight of 1 makes each mean a single term, and with 0 it does not count.
    assert find_mean(loss(leaf()), 1) is None
    assert find_mean(loss(leaf()), 0) is None


@pytest.mark.parametrize("loss", SUMS)
def test_a_sum_passes(loss: Loss) -> None:
    assert find_mean(loss(leaf()), 8) is None


def test_a_weight_of_another_shape_is_not_judged_here() -> None:
    assert find_mean(F.cross_entropy(leaf(), Y), torch.ones(8)) is None


def test_a_compiled_loss_is_not_judged() -> None:
    compiled = torch.compile(lambda x: F.cross_entropy(x, Y), backend="aot_eager")
    loss = compiled(leaf())
    assert loss.grad_fn.name() == "CompiledFunctionBackward"
    assert find_mean(loss, 8) is None


def train(folder: Path, loss: Callable[[Tensor, Tensor], Tensor], **settings: Any) -> None:
    with lockstep.start(global_batch=8, steps=1, run_dir=folder, **{"log.progress": "off"} | settings) as run:
        model, _ = run.setup(plain := nn.Linear(4, 4), torch.optim.SGD(plain.parameters(), lr=0.1))
        for step in run.steps(TensorDataset(X, Y)):
            for x, y in step:
                step.backward(loss(model(x), y), weight=len(y))
            step.apply()


def test_a_loop_with_a_mean_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a mean where a sum is needed") as error:
        train(tmp_path / "mean", F.cross_entropy)

    assert error.value.cause == "mean-for-sum"
    assert "reduction='sum'" in error.value.fix
    assert "loss * len(y)" in error.value.fix
    assert "checks.loss=mean-for-sum" in error.value.fix


@pytest.mark.parametrize("accepted", ["mean-for-sum", "off"])
def test_the_setting_for_tasks_accepts_it(tmp_path: Path, accepted: str) -> None:
    train(tmp_path / "mean", F.cross_entropy, **{"checks.loss": accepted})


def test_the_mean_times_its_terms_trains(tmp_path: Path) -> None:
    train(tmp_path / "sum", lambda out, y: F.cross_entropy(out, y) * len(y))
