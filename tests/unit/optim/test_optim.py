import math
import subprocess
import sys
from itertools import pairwise
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config import resolve
from lockstep.engine.checks.names import check_names
from lockstep.errors import UserError
from lockstep.optim.bf16_masters import MasterWeights
from lockstep.optim.capabilities import traits_of
from lockstep.optim.optimizers import Optimizers, clip_elements_
from lockstep.optim.registry import OPTIMIZERS, TRAITS, OptimizerSpec, OptimizerTraits, build_optimizers, describe
from lockstep.optim.schedule import SCHEDULES, ScheduleRate, batch_scaling, share_of_peak
from lockstep.optim.zero1 import ShardedOptimizers
from lockstep.runtime.world import World


def lr_config(**values):
    return resolve([("test", {"lr": values})]).config.lr


def curve(total=100, **values):
    return [share_of_peak(lr_config(**values), step, total) for step in range(total)]


@pytest.mark.parametrize("schedule", SCHEDULES)
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


def test_a_decay_that_is_shorter_than_two_steps_falls_in_the_last_step():
    assert curve(total=5, schedule="wsd", decay=0.2, min_ratio=0.5) == [1.0, 1.0, 1.0, 1.0, 0.5]
    assert curve(total=5, schedule="wsd", decay=0.01, min_ratio=0.5) == [1.0, 1.0, 1.0, 1.0, 0.5]
    assert curve(total=5, schedule="wsd", decay=0.4, min_ratio=0.5) == [1.0, 1.0, 1.0, 1.0, 0.5]
    assert curve(total=5, schedule="wsd", decay=0.0, min_ratio=0.5) == [1.0] * 5

    # A decay that is longer than what the warm-up leaves begins at the peak, not below it.
    long = curve(warmup=50, schedule="wsd", decay=0.8, min_ratio=0.0)
    assert long[50] == 1.0
    assert max(before - after for before, after in pairwise(long)) < 0.03


def test_a_run_of_one_step_has_a_rate():
    for schedule in SCHEDULES:
        assert curve(total=1, schedule=schedule)[0] > 0


@pytest.mark.parametrize(("rule", "expected"), [("none", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_batch_rules(rule, expected):
    assert batch_scaling(lr_config(scaling=rule, reference_batch=64), 256) == pytest.approx(expected)


def test_peak_sets_the_first_group_and_the_others_keep_their_ratio():
    a, b = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.02}])
    rate = ScheduleRate(lr_config(peak=1.0), [optimizer], total_steps=10, global_batch=8)
    rate.set(0)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1.0, 0.2])
    assert list(rate.landmarks()) == ["start", "warm-up end", "half", "end"]


def clip_config(values: dict[str, float]) -> Any:
    return resolve([("test", {"clip": values})]).config.clip


def test_clipping_by_value_and_relative_to_the_weight():
    parameter = nn.Parameter(torch.full((4,), 2.0))  # length 4
    grad = torch.tensor([3.0, -3.0, 0.1, 0.0])
    clip_elements_([parameter], [grad], clip_config({"value": 0.5}), torch._foreach_norm)
    assert grad.tolist() == pytest.approx([0.5, -0.5, 0.1, 0.0])
    long = torch.tensor([3.0, 4.0, 0.0, 0.0])
    clip_elements_([parameter], [long], clip_config({"adaptive": 0.25}), torch._foreach_norm)
    assert long.norm().item() == pytest.approx(1.0, rel=1e-4)  # 0.25 of the weight's length
    short = torch.tensor([0.3, 0.4, 0.0, 0.0])
    clip_elements_([parameter], [short], clip_config({"adaptive": 0.25}), torch._foreach_norm)
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


def test_a_schedule_is_one_function_and_one_entry(monkeypatch):
    def polynomial(config, step, total):
        return (1 - step / total) ** 2

    monkeypatch.setitem(SCHEDULES, "polynomial", polynomial)
    assert curve(total=4, schedule="polynomial") == [1.0, 0.5625, 0.25, 0.0625]
    lr_config(schedule="polynomial", min_ratio=0.1)  # is no constant: a floor means something


def test_an_unknown_schedule_is_refused_with_the_known_ones():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(UserError, match=r"lr\.schedule=cosin(.|\n)*constant, linear, cosine, wsd(.|\n)*=cosine"):
        ScheduleRate(lr_config(schedule="cosin"), [optimizer], total_steps=10, global_batch=8)


def test_an_optimizer_is_one_entry(monkeypatch):
    spec = OptimizerSpec("torch.optim.rmsprop:RMSprop", options=("lr", "momentum"), about="torch's RMSprop")
    monkeypatch.setitem(OPTIMIZERS, "rmsprop", spec)
    parameter = nn.Parameter(torch.ones(2))
    task = torch.optim.SGD([{"params": [parameter], "momentum": 0.5}], lr=0.1)
    (made,) = build_optimizers(resolve([("test", {"optimizer": "rmsprop"})]).config, task)
    assert type(made) is torch.optim.RMSprop
    assert [(group["lr"], group["momentum"]) for group in made.param_groups] == [(0.1, 0.5)]
    with pytest.raises(UserError, match=r"optimizer=adamv(.|\n)*task, adamw, sgd, adamw8bit, adafactor"):
        build_optimizers(resolve([("test", {"optimizer": "adamv"})]).config, task)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bytes_of_state_are_those_that_the_registry_gives(name):
    weight = nn.Parameter(torch.ones(512, 512))
    (made,) = build_optimizers(resolve([("test", {"optimizer": name})]).config, torch.optim.AdamW([weight]))
    weight.grad = torch.ones_like(weight)
    made.step()
    state = [value for value in made.state[weight].values() if isinstance(value, torch.Tensor) and value.dim()]
    found = sum(value.nbytes for value in state) / weight.numel()
    assert found == pytest.approx(OPTIMIZERS[name].traits.state_bytes or 0, abs=0.05)


def test_the_traits_are_those_of_classes_that_exist():
    """A class that moves would silently lose its traits."""
    for path in TRAITS:
        kind = resolve_name(path)
        assert f"{kind.__module__}:{kind.__qualname__}" == path
    torchs = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    missing = {kind.__name__ for kind in torchs if f"{kind.__module__}:{kind.__qualname__}" not in TRAITS}
    assert missing == {"Optimizer", "LBFGS"}


@pytest.mark.parametrize("name", ["task", *OPTIMIZERS])
def test_exact_takes_the_optimizers_that_are_known_to_be_exact(name):
    """At once, and again where the optimizer is built: a task's defaults are not known before."""
    weight = nn.Parameter(torch.ones(8, 8))
    config = resolve([("test", {"optimizer": name, "exact": True})]).config
    layers = [("test", {"optimizer": name}), ("test", {"exact": True})]
    if name in ("task", "adamw", "sgd"):
        check_names(layers)
        build_optimizers(config, torch.optim.AdamW([weight]))
    else:
        for refuse in (lambda: check_names(layers), lambda: build_optimizers(config, torch.optim.AdamW([weight]))):
            with pytest.raises(UserError, match=f"exact=true cannot be combined with optimizer={name}"):
                refuse()


def test_a_subclass_has_none_of_the_traits():
    class Mine(torch.optim.AdamW):
        pass

    assert traits_of(torch.optim.AdamW([nn.Parameter(torch.ones(2))])).divides
    assert traits_of(Mine([nn.Parameter(torch.ones(2))])) == OptimizerTraits()


def test_unknown_names_are_reported_before_a_launch():
    """All at once, and without torch."""
    program = (
        "import sys\n"
        "from lockstep.errors import ConfigError\n"
        "from lockstep.engine.checks.names import check_names\n"
        "names = {'lr': {'schedule': 'x'}, 'optimizer': 'y', 'log.sinks': ['csv', 'z']}\n"
        "try:\n"
        "    check_names([('test', {'lr.schedule': 'wsd', 'optimizer': 'task'}), ('test', names)])\n"
        "except ConfigError as error:\n"
        "    print(len(error.problems), 'torch' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "3 False"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_by_name_maximizes_or_refuses(name):
    task = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, maximize=True)
    config = resolve([("test", {"optimizer": name})]).config
    if "maximize" in OPTIMIZERS[name].options:
        (made,) = build_optimizers(config, task)
        assert made.param_groups[0]["maximize"]
    else:
        with pytest.raises(UserError, match=f"optimizer={name} cannot maximize"):
            build_optimizers(config, task)


def test_the_banner_names_the_state_of_momentum():
    assert "4 bytes per parameter if the task's groups have momentum" in describe("sgd")
    assert "about 8 bytes of state per parameter" in describe("adamw")
    assert not any("about 0 bytes" in describe(name) for name in OPTIMIZERS)


def test_a_step_that_raises_does_not_allow_direct_steps():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("broken")

    model = nn.Linear(2, 2)
    optimizers = Optimizers(Broken(model.parameters()), model)
    with pytest.raises(ValueError, match="broken"):
        optimizers.step(0, [0])
    with pytest.raises(UserError, match="called directly"):
        optimizers._refuse(None, None, None)
