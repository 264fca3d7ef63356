"""Parts of a step: their order, and what a pipeline refuses."""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lockstep import engine, parallel
from lockstep.config import resolve
from lockstep.engine.profile.tracer import StepTracer
from lockstep.parallel.driver import DriverSetup, RankRole, SingleDriver
from lockstep.parallel.progress import StepProgress
from lockstep.parallel.step_parts import ORDER, StepPart
from lockstep.precision import PRECISIONS
from lockstep.runtime import context
from lockstep.runtime.world import World


def driver(model: nn.Module, role: RankRole) -> SingleDriver:
    config = resolve([("test", {"device": "cpu"})]).config
    with context.start(World(), config) as runtime:
        return SingleDriver(model, DriverSetup(config, runtime, PRECISIONS["fp32"], role))


def part_at(name: str) -> StepPart:
    return type("Part", (StepPart,), {"slot": name})()


def all_parts(base: type = StepPart) -> Iterator[type[StepPart]]:
    for kind in base.__subclasses__():
        yield kind
        yield from all_parts(kind)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_parts_does_not_depend_on_which_is_added_first(seed: int) -> None:
    names = [name for name in ORDER if name != "statistics"]
    random.Random(seed).shuffle(names)
    found = driver(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), RankRole())
    shared = found.parts  # a pipeline's stages have it too
    for name in names:
        found.parts.add(part_at(name))

    # The statistics of the BatchNorm are there from the start.
    assert [part.slot for part in shared] == [*ORDER]


def test_every_part_of_the_package_has_a_slot() -> None:
    for package in (parallel, engine):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)

    kinds = [kind for kind in all_parts() if kind.__module__.startswith("lockstep.")]
    assert len(kinds) >= 10
    assert {kind.slot for kind in kinds} == {*ORDER}


class EndsMicroBatches(StepPart):
    slot = "kernels"

    def after_backward(self, progress: StepProgress) -> None:
        """End a micro-batch, of which a pipeline has many at a time."""


def test_a_pipeline_refuses_a_part_that_must_know_when_a_micro_batch_ends() -> None:
    model = nn.Linear(2, 2)
    driver(model, RankRole()).parts.add(EndsMicroBatches())
    pipelined = driver(model, RankRole(pipeline_depth=2))
    pipelined.parts.add(part_at("log"))
    with pytest.raises(AssertionError, match="in a pipeline"):
        pipelined.parts.add(EndsMicroBatches())


def test_a_pipeline_can_be_traced() -> None:
    """Only its trace lacks the marks of backwards."""
    config = resolve([("test", {"device": "cpu"})]).config
    run: Any = SimpleNamespace(runtime=None, config=config)
    driver(nn.Linear(2, 2), RankRole(pipeline_depth=2)).parts.add(StepTracer(run))
