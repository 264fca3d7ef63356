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
from lockstep.parallel.driver import DriverSetup
from lockstep.parallel.micro_batches import SingleDriver
from lockstep.parallel.step_parts import PART_ORDER, StepPart, StepParts
from lockstep.precision import PRECISIONS
from lockstep.runtime import context
from lockstep.runtime.world import World


def driver(model: nn.Module) -> SingleDriver:
    config = resolve([("test", {"device": "cpu"})]).config
    with context.start(World(), config) as runtime:
        return SingleDriver(model, DriverSetup(config, runtime, PRECISIONS["fp32"]))


def part_at(name: str) -> StepPart:
    return type("Part", (StepPart,), {"slot": name})()


def all_parts(base: type = StepPart) -> Iterator[type[StepPart]]:
    for kind in base.__subclasses__():
        yield kind
        yield from all_parts(kind)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_parts_does_not_depend_on_which_is_added_first(seed: int) -> None:
    names = [name for name in PART_ORDER if name != "statistics"]
    random.Random(seed).shuffle(names)
    found = driver(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    shared = found.parts  # a pipeline's stages have it too
    for name in names:
        found.parts.add(part_at(name))

    # The statistics of the BatchNorm are there from the start.
    assert [part.slot for part in shared] == [*PART_ORDER]


def test_every_part_of_the_package_has_a_slot() -> None:
    for package in (parallel, engine):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)

    kinds = [kind for kind in all_parts() if kind.__module__.startswith("lockstep.")]
    assert len(kinds) >= 10
    assert {kind.slot for kind in kinds} == {*PART_ORDER}


def test_a_pipeline_refuses_a_part_that_does_not_say_that_it_can_do_without_the_end_of_a_micro_batch() -> None:
    part = part_at("log")
    StepParts(overlapping=False).add(part)
    with pytest.raises(AssertionError, match="in a pipeline"):
        StepParts(overlapping=True).add(part)


def test_a_pipeline_can_be_traced() -> None:
    """Only its trace lacks the marks of backwards."""
    config = resolve([("test", {"device": "cpu"})]).config
    run: Any = SimpleNamespace(runtime=None, config=config)
    StepParts(overlapping=True).add(StepTracer(run))


def test_the_other_parts_that_run_in_a_pipeline_do_not_need_the_end_of_a_micro_batch() -> None:
    for kind in (kind for kind in all_parts() if kind.__module__.startswith("lockstep.") and kind.runs_in_pipeline):
        if kind is not StepTracer:
            assert kind.before_backward is StepPart.before_backward, kind
            assert kind.after_backward is StepPart.after_backward, kind
