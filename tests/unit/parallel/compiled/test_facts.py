"""The time of a step and the size of a model, by which a run decides whether to compile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lockstep.config import RunConfig, resolve
from lockstep.parallel.compiled import facts
from lockstep.parallel.compiled.batch_sizes import SeenShapes
from lockstep.parallel.compiled.facts import CompileFacts, StepTimer, _count_layers, count_operations
from lockstep.parallel.compiled.payoff import Payoff
from lockstep.parallel.compiled.targets import BLOCKS, MODEL
from lockstep.runtime.collectives import Collectives
from lockstep.runtime.world import World
from lockstep.task import Loss


class OneRank:
    """Stands in for a runtime."""

    on_gpu = False
    collectives = Collectives(World(), torch.device("cpu"))


class WithOneOther(Collectives):
    """Collectives of two ranks, of which the other always has the number 7."""

    def all_gather_json(self, value: Any, caller: str = "") -> list[Any]:
        return [value, 7]


def test_the_step_in_which_a_timer_is_made_does_not_count() -> None:
    timer = StepTimer(warm_up=1, timed=2)
    assert timer.end_step(OneRank()) is None  # type: ignore[arg-type]
    found = []
    for _ in range(3):
        timer.begin_step()
        found.append(timer.end_step(OneRank()))  # type: ignore[arg-type]
    assert found[:2] == [None, None]
    assert found[2] > 0


def test_a_run_that_finds_code_on_disk_keeps_the_cost_without_it(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(facts, "history_path", lambda: tmp_path / "compile.json")
    model = nn.Linear(2, 2)
    alone = Collectives(World(), torch.device("cpu"))
    runtime = SimpleNamespace(device=torch.device("cpu"), is_main=True, collectives=alone)
    for cold, cost_s in ((True, 30.0), (False, 4.0)):
        monkeypatch.setattr(facts, "is_cold", lambda cold=cold: cold)
        of_run = CompileFacts(SimpleNamespace(model=model, runtime=runtime), RunConfig())  # type: ignore[arg-type]
        of_run.gather(100, 0.0, None, SeenShapes())
        of_run.remember_unfinished(MODEL, 1.0)
        of_run.remember(MODEL, cost_s, 1.5)

    found = of_run.gather(100, 0.0, None, SeenShapes())
    assert found.records == {MODEL: Payoff(4.0, 1.5, cold_cost_s=30.0)}


def test_a_layer_that_blocks_share_counts_once():
    shared = nn.Linear(2, 2)
    blocks = [nn.Sequential(nn.Linear(2, 2), shared) for _ in range(4)]
    assert _count_layers(nn.Sequential(*blocks)) == _count_layers(*blocks) == 5


def test_blocks_that_the_user_names_are_the_blocks():
    """Two halves that are not equal are not detected, and a named class is compiled block by block if sizes vary."""
    model = nn.ModuleDict({"first": nn.Linear(2, 3), "second": nn.Linear(3, 2)})
    driver: Any = SimpleNamespace(model=model, runtime=OneRank())
    dims = frozenset({(0, 0)})
    for blocks, target in ((None, MODEL), (["Linear"], BLOCKS)):
        of_run = CompileFacts(driver, resolve([("test", {"compile": True, "blocks": blocks})]).config)
        assert of_run.preferred(None, dims)[0] == target


def test_operations_are_those_of_every_call_and_count_once():
    layer = nn.Linear(2, 2)
    x = torch.ones(3, 2)
    once = count_operations(layer(x))

    def looped(times: int) -> torch.Tensor:
        y = x
        for _ in range(times):
            y = layer(y)
        return y

    # Each call is a product with a transposed weight; the two parameters are shared.
    assert count_operations(looped(100)) - count_operations(looped(99)) == once - 2
    assert count_operations(Loss(looped(5).sum(), 3)) == count_operations([looped(5).sum(), {"other": None}])
    y = layer(x)
    assert count_operations((y, y)) == once
    assert count_operations(x) == 0


def test_the_first_call_is_counted_and_the_largest_of_all_ranks_decides() -> None:
    both = WithOneOther(World(), torch.device("cpu"))
    runtime = SimpleNamespace(device=torch.device("cpu"), is_main=False, collectives=both)
    layer = nn.Linear(2, 2)
    of_run = CompileFacts(SimpleNamespace(model=layer, runtime=runtime), RunConfig())  # type: ignore[arg-type]
    assert of_run.gather(100, 0.0, None, SeenShapes()).operations == 7
    y = layer(torch.ones(1, 2))
    for result in (y.detach(), y.sin().cos().exp().tan().tanh(), y):
        assert of_run.count_operations_once(result) is result
    assert of_run.gather(100, 0.0, None, SeenShapes()).operations == 9
