"""Buffers that a forward changes: kept by every rank for itself, or rank 0's for all at the start of every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.runtime.world import World
from lockstep.task import Loss, Task
from pool import Pool
from ranks.support import Trace, assert_user_errors, fit, weighted_regression
from ranks.test_exchange_count import MEASURED, collectives

RANKS, STEPS = 2, 4
VALUES = {"global_batch": 8, "micro_batch": 2, "steps": STEPS}  # two micro-batches on each of two ranks


class Centred(nn.Module):
    """What it predicts depends on a mean of the samples that it has seen, and so do its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 1)
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        found = self.out(x - self.centre)
        with torch.no_grad():
            self.centre.lerp_(x.mean(0), 0.5)
            self.seen += len(x)
        return found.squeeze(-1)


class Following(Task):
    changing_buffers = ("centre", "seen")

    def model(self) -> nn.Module:
        return Centred()

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    def data(self) -> Any:
        g = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(40, 3, generator=g) + 1, torch.randn(40, generator=g))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(((model(x) - y) ** 2).sum(), len(x))


def by_hand(traces: list[Trace], shared: bool) -> dict[str, Tensor]:
    """One process that goes through every rank's micro-batches with that rank's buffers."""
    task, data = Following(), Following().data()
    models = [Centred() for _ in traces]
    for model in models:
        model.load_state_dict(traces[0].initial, strict=False)
    for number in range(STEPS):
        first = dict(models[0].named_buffers())
        for model in models[1:] if shared else []:
            for name, buffer in model.named_buffers():
                buffer.copy_(first[name])
        for model, trace in zip(models, traces, strict=True):
            for piece in trace.steps[number].pieces:
                task.loss(model, data[piece.ids]).total.backward()
        _step_together(models)
    return {name: p.detach() for name, p in models[0].named_parameters()}


def _step_together(models: list[Centred]) -> None:
    with torch.no_grad():
        for copies in zip(*(model.parameters() for model in models), strict=True):
            whole = torch.stack([p.grad for p in copies]).sum(0) / VALUES["global_batch"]
            for p in copies:
                p -= 0.05 * whole
                p.grad = None


WAYS = {"ddp": {}, "zero1": {"strategy": "zero1"}, "unused": {"ddp.find_unused_parameters": True}}


@pytest.mark.parametrize("way", WAYS)
def test_rank_0s_buffers_at_the_start_of_every_step(pool: Pool, way: str) -> None:
    ends = {}
    for shared in (True, False):
        traces = pool.run(fit, Following(), VALUES | WAYS[way] | {"ddp.broadcast_buffers": shared}, world=RANKS)
        ends[shared] = by_hand(traces, shared)
        for trace in traces:
            torch.testing.assert_close(trace.steps[-1].weights, ends[shared], rtol=1e-5, atol=1e-7)
    assert not torch.allclose(ends[True]["out.weight"], ends[False]["out.weight"], rtol=1e-3), "no test of buffers"


def counted(world: World, store: Any, values: dict[str, Any]) -> dict[str, int]:
    """A job: the collectives of MEASURED steps of a model with three buffers of different formats."""
    task: Any = weighted_regression(160, seed=9)
    task.network = lambda: nn.Sequential(nn.Linear(5, 1), nn.BatchNorm1d(1), nn.Flatten(0))
    return collectives(world, store, task, {"global_batch": 16, "micro_batch": 2} | values)


def test_all_buffers_travel_in_one_message(pool: Pool) -> None:
    for found in pool.run(counted, {"ddp.broadcast_buffers": True}, world=2):
        assert found["c10d::broadcast_"] == MEASURED
    for found in pool.run(counted, {}, world=2):
        assert "c10d::broadcast_" not in found


class Caching(Centred):
    """Its forward registers a buffer, for samples that only some ranks see: rank 0's micro-batches have other ids."""

    def __init__(self, shape: tuple[int, ...] | None) -> None:
        super().__init__()
        self.shape = shape
        if shape:
            self.register_buffer("cache", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            self.register_buffer("cache", torch.zeros(self.shape or 3), persistent=False)
        return super().forward(x)


@pytest.mark.parametrize("way", ["ddp", "fsdp", "unused", "every step"])
@pytest.mark.parametrize("shape", [None, (2, 3)], ids=["registered", "replaced"])
def test_buffers_that_a_forward_changes_on_one_rank(pool: Pool, way: str, shape: tuple[int, ...] | None) -> None:
    """The ranks would send messages of different sizes, and wait for ever."""
    task = Following()
    task.model = lambda: Caching(shape)  # type: ignore[method-assign]
    ways = WAYS | {"fsdp": {"strategy": "fsdp"}, "every step": {"ddp.broadcast_buffers": True}}
    assert_user_errors(pool.errors(fit, task, VALUES | ways[way], world=RANKS), "'cache'", "on rank 1 than on rank 0")


class TwoCaches(Centred):
    """Its forward registers two buffers of the same shape, in an order that depends on the rank."""

    def forward(self, x: Tensor) -> Tensor:
        names = ["one", "two"] if torch.distributed.get_rank() == 0 else ["two", "one"]
        for name in names:
            if not hasattr(self, name):
                self.register_buffer(name, torch.full((3,), float(len(name) + (name == "two"))))
        return super().forward(x)


def both_caches(world: World, store: Any, task: Task) -> list[float]:
    """A job: the first numbers of both, at the end."""
    fit(world, store, task, VALUES)
    return [float(task.net.one[0]), float(task.net.two[0])]


def test_buffers_are_sent_by_name(pool: Pool) -> None:
    task: Any = Following()
    task.net = TwoCaches()
    task.model = lambda: task.net
    assert pool.run(both_caches, task, world=RANKS) == [[3.0, 4.0]] * RANKS


class Counting(Following):
    """Its model has attributes of its own, which the loss reads and changes."""

    def model(self) -> nn.Module:
        model = super().model()
        model.calls = 0
        return model

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        model.calls += 1
        return super().loss(model, batch)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_keeps_its_own_attributes(pool: Pool, way: str) -> None:
    """`calls`, say: what Lockstep puts around a model must not hide it."""
    pool.run(fit, Counting(), VALUES | WAYS[way], world=RANKS)
