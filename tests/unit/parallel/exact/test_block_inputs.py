"""The node that exact mode puts around the inputs of a block."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.config import RunConfig
from lockstep.parallel.exact.block_inputs import group_input_gradients

CONFIG = RunConfig(global_batch=4, steps=1, exact=True)
BIG = 2.0**24  # in float32, BIG + 1 is BIG, and BIG + 2 is not


class Reader(nn.Module):
    """Reads one tensor twice, with these gradients."""

    def __init__(self, *gradients: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.gradients = gradients

    def forward(self, memory: Tensor) -> Tensor:
        return self.weight * sum(memory * gradient for gradient in self.gradients)


class Readers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.ones(1))
        self.layers = nn.ModuleList([Reader(1.0, 1.0), Reader(BIG, 0.0)])

    def forward(self) -> Tensor:
        memory = self.memory * 1
        return sum((layer(memory) for layer in self.layers), torch.zeros(1)).sum()


def test_what_a_block_reads_is_added_inside_it_first() -> None:
    """(BIG + 0) + (1 + 1), not ((BIG + 0) + 1) + 1: the additions that FSDP's node leads to."""
    plain, grouped = Readers(), Readers()
    group_input_gradients(grouped, CONFIG)
    for model in (plain, grouped):
        model().backward()
    assert plain.memory.grad is not None
    assert grouped.memory.grad is not None
    assert (plain.memory.grad.item(), grouped.memory.grad.item()) == (BIG, BIG + 2)


class Changes(nn.Module):
    """A block that changes its input in place, as an activation with inplace=True does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(2.0))


def test_a_block_may_change_its_input_in_place() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Changes(), Changes()))
    x = torch.randn(2, 3)

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(model(x).sum(), list(model.parameters())))

    before = gradients()
    group_input_gradients(model, CONFIG)
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(), strict=True))


Pair = namedtuple("Pair", "left right")


@dataclass
class Record:
    left: Tensor
    number: int


class Keeps(nn.Module):
    """Keeps the arguments that its forward gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.args, self.kwargs = args, kwargs
        return self.weight


@pytest.mark.parametrize("gradients", [True, False])
def test_tensors_are_found_in_containers_and_the_rest_stays(gradients: bool) -> None:
    model = Keeps()
    group_input_gradients(model, CONFIG)
    x, plain, cache = torch.ones(2, requires_grad=True), torch.ones(2), object()
    untouched = {"mask": plain, "cache": cache}
    with torch.set_grad_enabled(gradients):
        model(x, [x, (x, plain)], Pair(x, 1), untouched, record=Record(x, 3), state={"x": x})

    first, (second, (third, mask)), pair, same = model.args
    record, state = model.kwargs["record"], model.kwargs["state"]
    found = [first, second, third, pair.left, record.left, state["x"]]
    assert all((tensor is not x) == gradients and torch.equal(tensor, x) for tensor in found)
    assert (type(pair), pair.right, type(record), record.number) == (Pair, 1, Record, 3)
    assert mask is plain
    assert same is untouched

    if gradients:
        torch.stack(found[:2]).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2.0, 2.0]
