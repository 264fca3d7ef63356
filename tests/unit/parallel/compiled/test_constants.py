"""A compiled loss is captured as a CUDA graph only while everything that it reads is known and unchanged."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.parallel.compiled.installed import Constants

BETA = 0.5
SEEN: list[int] = []


class Plain:
    factor = 1.0

    def __init__(self) -> None:
        self.weight, self.names, self.rows = 2.0, ("a", "b"), torch.zeros(3)

    def loss(self, model: Any, batch: Any) -> Any:
        return torch.sum(batch) * self.weight * len(self.names) * self.scale() * helper()

    def scale(self) -> float:
        return self.factor

    def data(self) -> Any:
        return self.rows


def helper() -> float:
    return BETA


def test_plain_values_hold_until_one_changes() -> None:
    task = Plain()
    constants = Constants(task.loss)
    assert constants.hold
    task.weight = 3.0
    assert not constants.hold
    task.weight = 2.0
    assert constants.hold
    task.factor = 0.5  # an attribute in place of that of the class, read by a method
    assert not constants.hold


def test_a_global_of_a_function_that_the_loss_calls() -> None:
    constants = Constants(Plain().loss)
    globals()["BETA"] = 0.25
    try:
        assert not constants.hold
    finally:
        globals()["BETA"] = 0.5


def test_what_cannot_be_compared_never_holds() -> None:
    class Tensors(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.center = torch.zeros(2)

        def scale(self) -> Any:
            return self.center

    class Global(Plain):
        def loss(self, model: Any, batch: Any) -> Any:
            SEEN.append(1)

    factor = [1.0]

    class Closure(Plain):
        def loss(self, model: Any, batch: Any) -> Any:
            return factor[0]

    class Computed(Plain):
        def loss(self, model: Any, batch: Any) -> Any:
            return getattr(self, "rows")  # noqa: B009

    for kind in (Tensors, Global, Closure, Computed):
        assert not Constants(kind().loss).hold, kind
    assert not Constants(helper).hold  # no task: it may be any function


def test_a_loss_without_python_code() -> None:
    task = Plain()
    assert not Constants(task.names.count).hold
