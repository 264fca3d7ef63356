"""A step in which no parameter gets a gradient trains nothing: it is refused, under every strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.engine import loop
from lockstep.engine.own_loop import OwnRun
from lockstep.runtime.world import World
from lockstep.task import Loss, Task
from pool import Pool
from ranks.support import assert_user_errors, open_watched, train_by_hand

VALUES: dict[str, Any] = {"global_batch": 8, "micro_batch": 2, "steps": 2}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "unused": {"ddp.find_unused_parameters": True},
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp-grads": {"strategy": "fsdp-grads"},
    "tp": {"strategy": "tp"},
    "pp": {"strategy": "pp"},
    "exact": {"exact": True},
    "exact fsdp": {"exact": True, "strategy": "fsdp"},
    "exact unused": {"exact": True, "ddp.find_unused_parameters": True},
}


class Regression(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def data(self) -> Any:
        return TensorDataset(torch.randn(56, 3, generator=torch.Generator().manual_seed(1)))

    def tensor_plan(self, model: Any) -> dict[str, str]:
        return {"0": "colwise", "2": "rowwise"}


class OfNothing(Regression):
    """Its loss has a gradient, which leads to no parameter."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        found = model(batch[0]).detach().requires_grad_()
        return Loss(found.square().sum(), len(found))


class WithoutGradients(Regression):
    """Its model runs under no_grad; what it computes with the result has a gradient."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        with torch.no_grad():
            found = model(batch[0])
        return Loss((found * torch.ones((), requires_grad=True)).square().sum(), len(found))


def fit(world: World, store: Any, task: Task, values: dict[str, Any]) -> None:
    with open_watched(world, store, values) as builder:
        loop.fit(task, builder)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("task", [OfNothing, WithoutGradients])
def test_a_loss_that_reaches_no_parameter_is_refused(pool: Pool, task: type[Task], strategy: str) -> None:
    errors = pool.errors(fit, task(), VALUES | STRATEGIES[strategy], world=2)
    assert_user_errors(errors, "gets a gradient", "no_grad")


@pytest.mark.parametrize("task", [OfNothing, WithoutGradients])
def test_one_process_refuses_it_too(pool: Pool, task: type[Task]) -> None:
    for values in ({}, {"checks.loss": "all"}):
        assert_user_errors(pool.errors(fit, task(), VALUES | values, world=1), "gets a gradient", "no_grad")


def fit_as_before_torch_2_13(world: World, store: Any, task: Task, values: dict[str, Any]) -> None:
    """With a stage that refuses, on its rank alone, to send a gradient that does not exist."""
    from torch.distributed.pipelining import PipelineStage

    send = PipelineStage.get_bwd_send_ops

    def strict(stage: Any, chunk: int) -> Any:
        if not stage.is_first and any(gradient is None for gradient in stage.bwd_cache[chunk]):
            raise RuntimeError(f"[{stage.stage_index}] has gradients None and is expecting to send gradients")
        return send(stage, chunk)

    PipelineStage.get_bwd_send_ops = strict  # pyrefly: ignore[bad-assignment]
    fit(world, store, task, values)


def test_every_torch_lets_a_pipeline_say_it_on_all_ranks(pool: Pool) -> None:
    errors = pool.errors(fit_as_before_torch_2_13, OfNothing(), VALUES | STRATEGIES["pp"], world=2)
    assert_user_errors(errors, "gets a gradient", "no_grad")


class Refused(Regression):
    """Its loss is refused, and in a pipeline only the rank of the last stage computes it."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(model(batch[0]).sum(), -1)


def test_a_refused_loss_is_named_by_all_ranks_of_a_pipeline(pool: Pool) -> None:
    """Not a connection that the others have lost."""
    errors = pool.errors(fit, Refused(), VALUES | STRATEGIES["pp"], world=2)
    assert_user_errors(errors, "the weight of a loss is the number of its terms; it cannot be -1")


class Detach(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


class DetachedInside(Regression):
    """Nothing that the last stage returns has a gradient."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), Detach())

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        found = model(batch[0])
        return Loss(found.square().sum(), len(found))


def test_an_output_without_gradients_is_named_by_all_ranks_of_a_pipeline(pool: Pool) -> None:
    errors = pool.errors(fit, DetachedInside(), VALUES | STRATEGIES["pp"], world=2)
    assert_user_errors(errors, "the loss must be one number with a gradient", "requires_grad=False")


class Distilled(Regression):
    """A forward without gradients after one with them, as for a target that the model makes itself."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        found = model(batch[0])
        with torch.no_grad():
            target = model(-batch[0])
        return Loss((found - target).square().sum(), len(found))


def test_a_second_forward_without_gradients_is_no_mistake(pool: Pool) -> None:
    assert pool.errors(fit, Distilled(), VALUES, world=2) == [None, None]


def own_loop(world: World, store: Any) -> None:
    with open_watched(world, store, VALUES) as builder:
        train_by_hand(OwnRun(builder), OfNothing())


def test_a_loop_of_ones_own_is_refused_too(pool: Pool) -> None:
    assert_user_errors(pool.errors(own_loop, world=2), "gets a gradient")
