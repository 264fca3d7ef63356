"""Sums of gradients over ranks that Lockstep computes itself: their precision, their layout, and who takes part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.parallel.gradients import count_and_sum, sum_gradients
from lockstep.runtime import context
from lockstep.runtime.world import World
from lockstep.task import Loss, Task
from pool import Pool
from ranks.support import configured, open_watched

RANKS = 4
MASTERS = {"precision": "bf16-master"}


def drawn(rank: int, count: int) -> list[Tensor]:
    """Gradients of one rank, in bf16, whose sums over 4 ranks in bf16 would often round several times."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(3, 4, 2, 2, generator=generator).bfloat16() for _ in range(count)]


def rounded_once(gradients: list[Tensor]) -> Tensor:
    return torch.stack([gradient.double() for gradient in gradients]).sum(0).bfloat16()


def summed(world: World, store: Any) -> list[Tensor | None]:
    """A job: what `count_and_sum` leaves for a plain parameter, one in channels_last, one used on rank 1, an unused."""
    with context.start(world, configured({}).config, store=store) as runtime:
        like = torch.zeros(3, 4, 2, 2, dtype=torch.bfloat16)
        parameters = [nn.Parameter(like.clone()) for _ in range(4)]
        parameters[1] = nn.Parameter(like.to(memory_format=torch.channels_last))
        plain, last, once = drawn(world.rank, 3)
        parameters[0].grad = plain
        parameters[1].grad = last.to(memory_format=torch.channels_last)
        if world.rank == 1:
            parameters[2].grad = once

        count_and_sum(parameters, runtime.collectives)
        assert parameters[1].grad is not None
        assert parameters[1].grad.stride() == parameters[1].stride()
        assert all(p.grad is None or p.grad.dtype == torch.bfloat16 for p in parameters)
        return [None if p.grad is None else p.grad.contiguous() for p in parameters]


def test_half_precision_is_added_in_float32_and_rounded_once(pool: Pool) -> None:
    every_rank = [drawn(rank, 3) for rank in range(RANKS)]
    plain, last = (rounded_once([gradients[index] for gradients in every_rank]) for index in (0, 1))
    for found in pool.run(summed, world=RANKS):
        assert torch.equal(found[0], plain)
        assert torch.equal(found[1], last)
        assert torch.equal(found[2], every_rank[1][2])
        assert found[3] is None


def alone(world: World, store: Any) -> bool:
    with context.start(world, configured({}).config, store=store) as runtime:
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = gradient = torch.ones(2)
        sum_gradients([parameter], runtime.collectives)
        count_and_sum([parameter], runtime.collectives)
        return parameter.grad is gradient


def test_one_rank_has_nothing_to_sum(pool: Pool) -> None:
    assert pool.run(alone, world=1) == [True]


# ---- in runs --------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A layer, and a scalar, which FSDP does not reduce. The gradient of the scalar is the sum of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 4)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * x.to(self.scale.dtype)).sum() + 0 * self.layer(x).sum()


class Samples(Task):
    def model(self) -> nn.Module:
        return Scaled()

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.0)

    def data(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        self.samples = torch.randn(4 * 32, 1, generator=generator).bfloat16().float()
        return TensorDataset(self.samples)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Loss(model(batch[0]), len(batch[0]))


def scalar_gradients(world: World, store: Any, values: dict[str, Any]) -> list[tuple[float, float]]:
    """A job: the reduced gradient of the scalar in each step, and what it must be."""
    task = Samples()
    found = []
    with open_watched(world, store, {"global_batch": 4, "micro_batch": 1, "steps": 32, **MASTERS, **values}) as builder:
        driver = builder.setup_model(task.model(), task.optimizer).driver
        run = builder.setup_run(task.data(), task.collate)
        for batches in run.step_batches():
            progress = run.stepper.new_progress(batches)
            reduced = driver.forward_backward(batches, task.loss, progress)
            gradient = driver.parameters["scale"].grad
            assert gradient is not None
            own = [int(i) for micro in progress.micro_batches for i in micro.ids]
            ids = [i for ranks in builder.runtime.collectives.all_gather_json(own) for i in ranks]
            expected = task.samples[ids].double().sum().bfloat16()
            found.append((float(gradient), float(expected)))
            run.end_step(batches, run.stepper.apply(progress, reduced))

    return found


@pytest.mark.parametrize("values", [{"strategy": "fsdp"}, {"ddp.find_unused_parameters": True}, {}], ids=str)
def test_the_gradient_of_a_scalar_is_reduced_in_float32(pool: Pool, values: dict[str, Any]) -> None:
    """As the banner says, for parameters that are stored in bf16."""
    found = pool.run(scalar_gradients, values, world=RANKS)[0]
    assert len(found) == 32
    to_sum = RANKS if not values else 1  # DDP leaves means
    assert [gradient * to_sum for gradient, _ in found] == [expected for _, expected in found]
