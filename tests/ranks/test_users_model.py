"""What a loss gets is the user's own model: whatever it does with it means the same on one rank and on many."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.runtime.world import World
from pool import Pool
from ranks.support import JOBS, Perceptron, Regression, assert_user_errors

VALUES = {"global_batch": 8, "micro_batch": 2, "steps": 3}


class Net(nn.Sequential):
    gain = 1.0
    dim = 3  # also an attribute of torch's DDP

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))
        self.register_buffer("offset", torch.tensor(0.5))
        self.gain = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze(-1) * self.gain * getattr(self, "scale", 1.0) + self.offset


def count_by_apply(model: Any) -> int:
    seen: list[nn.Module] = []
    model.apply(seen.append)
    return len(seen)


# What a loss may find out about its model: (model) -> a number.
VIEWS: dict[str, Callable[[Any], float]] = {
    "an attribute that DDP has, too": lambda model: model.dim,
    "isinstance": lambda model: 1 + isinstance(model, Net),
    "type": lambda model: 1 + (type(model) is Net),
    "repr": lambda model: 1 + repr(model).startswith("Net("),
    "vars": lambda model: 1 + ("gain" in vars(model)),
    "dir": lambda model: 1 + ("reducer" in dir(model)),
    "hasattr": lambda model: 1 + hasattr(model, "no_sync"),
    "named_modules": lambda model: 1 + sum(name == "0" for name, _ in model.named_modules()),
    "modules": lambda model: len(list(model.modules())),
    "named_children": lambda model: 1 + sum(name == "0" for name, _ in model.named_children()),
    "children": lambda model: len(list(model.children())),
    "named_buffers": lambda model: 1 + sum(name == "offset" for name, _ in model.named_buffers()),
    "get_buffer": lambda model: float(model.get_buffer("offset")),
    "apply": count_by_apply,
    "len": len,
    "an index": lambda model: model[0].out_features,
    "iter": lambda model: sum(isinstance(part, nn.Linear) for part in model),
}


def set_attribute(model: Any) -> None:
    model.scale = 0.5


def delete_attribute(model: Any) -> None:
    if "gain" in vars(model):
        del model.gain


def through_parts(task: Regression, model: Any, x: Tensor) -> Tensor:
    return model.out(torch.tanh(model.hidden(x))).squeeze(-1)


def hooked(task: Regression, model: Any, x: Tensor) -> Tensor:
    factor = {"Perceptron": 2.0}
    with model.register_forward_hook(lambda module, args, output: output * factor.get(type(module).__name__, 3.0)):
        return model(x)


# Ways through the model: (task, model, x) -> predictions. In plain PyTorch, DDP misses some of them.
CALLS: dict[str, Callable[[Any, Any, Tensor], Tensor]] = {
    "self.net": lambda task, model, x: task.net(x),
    "its forward": lambda task, model, x: model.forward(x),
    "its parts": through_parts,
    "its parts, then the model": lambda task, model, x: through_parts(task, model, x) + model(x),
    "twice": lambda task, model, x: model(x) + model(2 * x),
    "in some micro-batches": lambda task, model, x: (task.net if task.calls % 2 else model)(x),
    "functional_call": lambda task, model, x: torch.func.functional_call(model, dict(model.named_parameters()), (x,)),
    "a hook on the model": hooked,
}


def assert_same(pool: Pool, job: str, task: Regression, values: Mapping[str, Any] = MappingProxyType({})) -> None:
    """The parameters after every step are those of a single rank."""
    (alone,) = pool.run(JOBS[job], task, VALUES, world=1)
    for trace in pool.run(JOBS[job], task, VALUES | values, world=2):
        for found, expected in zip(trace.steps, alone.steps, strict=True):
            torch.testing.assert_close(found.weights, expected.weights, rtol=1e-4, atol=1e-6)


def views(world: World, store: Any) -> dict[str, float]:
    """A job: what the loss sees."""
    seen: dict[str, float] = {}

    def predict(task: Regression, model: Any, x: Tensor) -> Tensor:
        seen.update({name: float(view(model)) for name, view in VIEWS.items()})
        return model(x)

    JOBS["fit"](world, store, Regression(predict, network=Net), VALUES)
    return seen


def test_a_loss_sees_the_users_model(pool: Pool) -> None:
    (alone,) = pool.run(views, world=1)
    assert alone.keys() == VIEWS.keys()
    assert pool.run(views, world=2) == [alone, alone]


@pytest.mark.parametrize("change", [set_attribute, delete_attribute])
def test_a_loss_changes_the_users_model(pool: Pool, change: Callable[[Any], None]) -> None:
    def predict(task: Regression, model: Any, x: Tensor) -> Tensor:
        change(model)
        return model(x)

    assert_same(pool, "fit", Regression(predict, network=Net))


@pytest.mark.parametrize("job", sorted(JOBS))
@pytest.mark.parametrize("call", CALLS)
def test_every_way_through_the_model_is_reduced(pool: Pool, call: str, job: str) -> None:
    assert_same(pool, job, Regression(CALLS[call], network=Perceptron))


class Recomputed(nn.Module):
    """Checkpoints a part with a backward of its own: the first layer, whose gradients come last, or the second."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 1)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        layers = dict(self.named_children())
        if self.part == "first":
            x = x.clone().requires_grad_()  # or torch would not recompute it
        for name, layer in layers.items():
            x = checkpoint(layer, x, use_reentrant=True) if name == self.part else layer(x)
        return x.squeeze(-1)


@pytest.mark.parametrize("job", sorted(JOBS))
@pytest.mark.parametrize("part", ["first", "second"])
def test_a_gradient_that_comes_in_parts(pool: Pool, part: str, job: str) -> None:
    """torch's DDP reduces the first part only: silently where that part completes the last bucket."""
    task = Regression(CALLS["twice"], network=lambda: Recomputed(part))
    errors = pool.errors(JOBS[job], task, VALUES, world=2)
    assert_user_errors(errors, f"the gradient of '{part}.", "in several parts", "use_reentrant=False")

    # One call is one part, and the other driver waits for all of them.
    assert_same(pool, job, Regression(network=lambda: Recomputed(part)))
    assert_same(pool, job, task, {"ddp.find_unused_parameters": True})


def test_the_loss_and_the_custom_loop_get_the_same_object(pool: Pool) -> None:
    def predict(task: Regression, model: Any, x: Tensor) -> Tensor:
        assert model is task.net
        return model(x)

    for job in JOBS.values():
        pool.run(job, Regression(predict), VALUES, world=2)
