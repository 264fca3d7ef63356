import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config import resolve
from lockstep.optim.bf16_masters import MasterWeights
from lockstep.optim.clip import Clipping
from lockstep.optim.schedule import LearningRate, batch_scaling, factor
from lockstep.optim.zero1 import ShardedOptimizers
from lockstep.runtime.world import World


def lr_config(**values):
    return resolve([("test", {"lr": values})]).config.lr


def curve(total=100, **values):
    return [factor(lr_config(**values), step, total) for step in range(total)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_warm_up_starts_above_zero_and_reaches_the_peak(schedule):
    rates = curve(schedule=schedule, warmup=10)
    assert 0 < rates[0] <= 0.1
    assert rates[:11] == sorted(rates[:11])
    assert max(rates) == pytest.approx(1.0)


def test_shapes():
    assert curve(schedule="constant") == [1.0] * 100
    linear = curve(schedule="linear", min_ratio=0.1)
    assert linear[0] == 1.0
    assert linear[-1] == pytest.approx(0.1)
    assert linear[50] == pytest.approx(1 - 0.9 * 50 / 99)
    cosine = curve(schedule="cosine", min_ratio=0.1, warmup=1)
    assert cosine[-1] == pytest.approx(0.1)
    assert cosine[50] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 49 / 98)))
    wsd = curve(schedule="wsd", decay=0.2, min_ratio=0.0)
    assert wsd[:80] == [1.0] * 80
    assert wsd[79:] == sorted(wsd[79:], reverse=True)
    assert wsd[-1] == pytest.approx(0.0)
    assert curve(schedule="wsd", decay=0.2, min_ratio=0.3)[-1] == pytest.approx(0.3)


def test_a_run_of_one_step_has_a_rate():
    for schedule in ("constant", "linear", "cosine", "wsd"):
        assert curve(total=1, schedule=schedule)[0] > 0


@pytest.mark.parametrize(("rule", "expected"), [("none", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_batch_rules(rule, expected):
    assert batch_scaling(lr_config(scaling=rule, reference_batch=64), 256) == pytest.approx(expected)


def test_peak_sets_the_first_group_and_the_others_keep_their_ratio():
    a, b = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.02}])
    rate = LearningRate(lr_config(peak=1.0), [optimizer], total_steps=10, global_batch=8)
    rate.set(0)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1.0, 0.2])
    assert list(rate.landmarks()) == ["start", "warm-up end", "half", "end"]


def test_clipping_by_value_and_relative_to_the_weight():
    parameter = nn.Parameter(torch.full((4,), 2.0))  # length 4
    grad = torch.tensor([3.0, -3.0, 0.1, 0.0])
    Clipping(resolve([("test", {"clip": {"value": 0.5}})]).config.clip).clip_elements_(
        [parameter], [grad], torch._foreach_norm
    )
    assert grad.tolist() == pytest.approx([0.5, -0.5, 0.1, 0.0])
    long = torch.tensor([3.0, 4.0, 0.0, 0.0])
    Clipping(resolve([("test", {"clip": {"adaptive": 0.25}})]).config.clip).clip_elements_(
        [parameter], [long], torch._foreach_norm
    )
    assert long.norm().item() == pytest.approx(1.0, rel=1e-4)  # 0.25 of the weight's length
    short = torch.tensor([0.3, 0.4, 0.0, 0.0])
    Clipping(resolve([("test", {"clip": {"adaptive": 0.25}})]).config.clip).clip_elements_(
        [parameter], [short], torch._foreach_norm
    )
    assert short.norm().item() == pytest.approx(0.5)


def test_what_an_optimizer_has_set_up_at_once_goes_where_its_parameters_go():
    """Adagrad makes its state in its constructor. Of another rank's parameters it would be saved as it was at first."""
    model = nn.Linear(2, 2).bfloat16()
    made = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    runtime: Any = SimpleNamespace(world=World(0, 2))
    optimizers = ShardedOptimizers(made, model, runtime)
    assert list(made.state) == [model.weight]
    MasterWeights(optimizers.all, model, "master", seed=0)
    ((stand_in, state),) = made.state.items()
    assert stand_in is made.param_groups[0]["params"][0]
    assert stand_in is not model.weight
    assert state["sum"].dtype == torch.float32
    assert state["sum"].tolist() == [[0.5, 0.5], [0.5, 0.5]]
