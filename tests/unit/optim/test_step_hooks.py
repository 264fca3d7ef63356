"""Hooks on the steps of optimizers find gradients at their true size, whenever they are set; and late parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import TensorDataset

import lockstep
from lockstep.config import ClipConfig
from lockstep.errors import UserError
from lockstep.optim.bf16_masters import MasterWeights
from lockstep.optim.capabilities import step_hook
from lockstep.optim.optimizers import Optimizers, Update

SETTINGS: dict[str, Any] = {"global_batch": 8, "steps": 3, "log": {"progress": "off"}}
CPU = torch.device("cpu")


@pytest.fixture
def removed() -> Iterator[list[Any]]:
    """Handles of hooks, which are removed after the test: hooks of all optimizers outlive a run."""
    handles: list[Any] = []
    yield handles
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("factor", [1e-39, 1e-45, 0.0])
def test_a_factor_whose_inverse_float32_cannot_hold(factor: float) -> None:
    """As after clipping an enormous gradient: the update is that of an optimizer that does not divide."""
    weights = []
    for fused in (False, True):
        model = nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        model.weight.grad = torch.tensor([[3e38, -1e38]])
        optimizers = Optimizers(torch.optim.SGD(model.parameters(), lr=1.0, fused=fused), model)
        norms = lambda tensors: [tensor.norm() for tensor in tensors]
        Update(optimizers, ClipConfig(), True, norms, CPU).step([model.weight], factor, 1, [0])
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)


def seen_by_hook(run_dir: Path, when: str, fused: bool, handles: list[Any]) -> list[float]:
    """Return the gradients that a hook has seen in three steps. `when` it is set: before setup, before, in the loop."""
    torch.manual_seed(0)
    seen: list[float] = []
    with lockstep.start(run_dir=run_dir, **SETTINGS) as run:
        plain = nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.0, fused=fused)

        def hook(*_: Any) -> None:
            assert plain.weight.grad is not None
            seen.append(plain.weight.grad.item())

        if when == "of all":
            handles.append(torch_optimizer.register_optimizer_step_pre_hook(hook))

        model, optimizer = run.setup(plain, optimizer)
        if when == "before":
            optimizer.register_step_pre_hook(hook)

        for step in run.steps(TensorDataset(torch.arange(8.0)[:, None])):
            if when == "in the loop" and step.index == 0:
                optimizer.register_step_pre_hook(hook)

            for (x,) in step:
                step.backward((model(x) ** 2).sum(), weight=len(x))

            step.apply()

    return seen


@pytest.mark.parametrize("when", ["of all", "before", "in the loop"])
def test_a_late_hook_before_the_step_finds_gradients_at_their_true_size(
    when: str, removed: list[Any], tmp_path: Path
) -> None:
    expected = seen_by_hook(tmp_path / "plain", "before", fused=False, handles=removed)
    assert len(expected) == 3
    assert seen_by_hook(tmp_path / "fused", when, fused=True, handles=removed) == pytest.approx(expected)


def fused_update() -> tuple[torch.optim.Optimizer, Update]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)

    return optimizer, Update(Optimizers(optimizer, model), ClipConfig(), True, torch._foreach_norm, CPU)


def test_a_device_that_decides_takes_no_hook_during_the_loop() -> None:
    optimizer, update = fused_update()
    factor, skip = torch.tensor(0.5), torch.tensor(False)
    assert update.skips_on_device
    update.step_on_device(factor, skip, 1, [0])

    handle = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UserError, match="a hook was set on the step of an optimizer during the loop"):
        update.step_on_device(factor, skip, 2, [0])

    # Before the loop it is noticed, and the host divides.
    update.choose_kernels()
    assert not update.skips_on_device
    handle.remove()


def test_a_late_hook_is_refused_where_an_early_one_is() -> None:
    model = nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizers = Optimizers(optimizer, model)
    optimizers.use_masters(MasterWeights(optimizers.all, model, "master", seed=0))
    optimizers.check_step_hooks()
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(UserError, match="SGD cannot be used here: parameters are stored in bfloat16"):
        optimizers.check_step_hooks()


def test_torch_keeps_hooks_where_they_are_looked_for(removed: list[Any]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    for register in (
        torch_optimizer.register_optimizer_step_post_hook,
        torch_optimizer.register_optimizer_step_pre_hook,
        optimizer.register_step_post_hook,
        optimizer.register_step_pre_hook,
    ):
        assert step_hook(optimizer) is None
        handle = register(lambda *_: None)
        removed.append(handle)
        assert step_hook(optimizer) == register.__name__
        handle.remove()


def test_hooks_of_torch_and_our_own_are_not_the_users() -> None:
    optimizer, update = fused_update()
    update._optimizers.refuse_direct_steps()
    optimizer.register_step_pre_hook(torch.profiler.record_function.__enter__)
    assert step_hook(optimizer) is None
    update.choose_kernels()
    assert update.skips_on_device


def add_late(add: Callable[[Any], None], at_step: int, run_dir: Path) -> None:
    """Train three steps, and call `add` with the optimizer: after `run.setup` if `at_step` is -1, or in that step."""
    with lockstep.start(run_dir=run_dir, **SETTINGS) as run:
        model, optimizer = run.setup(plain := nn.Linear(1, 1), torch.optim.SGD(plain.parameters(), lr=0.01))
        if at_step < 0:
            add(optimizer)

        for step in run.steps(TensorDataset(torch.ones(8, 1))):
            if step.index == at_step:
                add(optimizer)

            for (x,) in step:
                step.backward(model(x).sum(), weight=len(x))

            step.apply()


@pytest.mark.parametrize("at_step", [-1, 1])
def test_a_parameter_group_that_is_added_late_is_refused(at_step: int, tmp_path: Path) -> None:
    """Its gradients would be sums, and stay from step to step."""
    group = {"params": [nn.Parameter(torch.ones(1))]}
    with pytest.raises(UserError, match="a parameter group was added"):
        add_late(lambda optimizer: optimizer.add_param_group(group), at_step, tmp_path / "run")


def test_a_parameter_that_is_added_to_a_group_is_refused(tmp_path: Path) -> None:
    extra = nn.Parameter(torch.ones(1))
    with pytest.raises(UserError, match="1 trainable parameters that the model does not have"):
        add_late(lambda optimizer: optimizer.param_groups[0]["params"].append(extra), -1, tmp_path / "run")


def test_a_measured_pass_of_weight_0_has_the_gradient_0(tmp_path: Path) -> None:
    """SAM moves the weights by it, and back by subtraction: nan would stay in them."""
    with lockstep.start(run_dir=tmp_path / "run", **SETTINGS) as run:
        model, _ = run.setup(plain := nn.Linear(1, 1), torch.optim.SGD(plain.parameters(), lr=0.01))
        for step in run.steps(TensorDataset(torch.ones(8, 1)), passes=2):
            for (x,) in step:
                step.backward((model(x) * torch.nan).sum(), weight=0)

            result = step.measure()
            assert (result.weight, result.grad_norm, result.skip_reason, result.applied) == (0, 0, None, False)
            assert [p.grad.item() for p in plain.parameters() if p.grad is not None] == [0, 0]

            for (x,) in step:
                step.backward(model(x).sum(), weight=len(x))

            step.apply()
