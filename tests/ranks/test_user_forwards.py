"""The user's own code calls a model with BatchNorm between two steps, when each rank has statistics of its own."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from lockstep.engine import loop
from lockstep.engine.own_loop import OwnRun
from lockstep.files.jsonl import read_jsonl
from lockstep.parallel.batchnorm.user_forwards import UserForwards
from lockstep.runtime.world import World
from lockstep.task import Loss, Task
from pool import Pool
from ranks.support import assert_user_errors, open_watched

STEPS = 4
VALUES = {"global_batch": 16, "micro_batch": 4, "steps": STEPS, "lr.schedule": "constant"}

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 + 5
Y = (X[:, 0] > 5).long()


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def validate(model: nn.Module) -> float:
    with torch.no_grad():
        return F.cross_entropy(model(X), Y).item()


def warnings_in(folder: Path) -> list[str]:
    reasons = [event["reason"] for event in read_jsonl(folder / "events.jsonl") if event["event"] == "warning"]
    return [reason for reason in reasons if "running statistics" in reason]


class Validated(Task):
    """Validates a copy of its model after every second step, in a hook."""

    def __init__(self, syncs: bool):
        self.syncs = syncs
        self.found: list[float] = []

    def model(self) -> nn.Module:
        return network()

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def data(self) -> Any:
        return TensorDataset(X, Y)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))

    def after_step(self, run: Any, result: Any) -> None:
        if run.steps_done % 2:
            return

        if self.syncs:
            run.sync_buffers()

        pickle.dumps(run.model)  # what notices the forwards must not prevent this
        self.found.append(validate(copy.deepcopy(run.model).eval()))


def in_hook(world: World, store: Any, values: dict[str, Any], syncs: bool) -> list[float]:
    """A job: what the hook finds after two and after four steps."""
    task = Validated(syncs)
    with open_watched(world, store, VALUES | values) as builder:
        loop.fit(task, builder)
    return task.found


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_hook_that_combines_the_statistics_finds_what_one_rank_finds(
    pool: Pool, tmp_path: Path, strategy: str
) -> None:
    (expected,) = pool.run(in_hook, {}, True, world=1)
    values = {"run_dir": str(tmp_path), "strategy": strategy}
    for found in pool.run(in_hook, values, True, world=2):
        assert found == pytest.approx(expected, abs=1e-12)
    assert not warnings_in(tmp_path)


def test_a_hook_that_does_not_is_warned_once(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(in_hook, {"run_dir": str(tmp_path)}, False, world=2)
    assert first != second, "each rank has statistics of its own"
    (reason,) = warnings_in(tmp_path)
    assert "in eval mode between two steps" in reason
    assert "those of rank 0 alone" in reason
    assert "run.sync_buffers()" in reason

    # One rank has the statistics of all.
    pool.run(in_hook, {"run_dir": str(tmp_path / "one")}, False, world=1)
    assert not warnings_in(tmp_path / "one")


def in_loop(world: World, store: Any, values: dict[str, Any], way: str) -> tuple[list[float], torch.Tensor]:
    """A job: what an own loop finds between its steps, and the running mean that it ends with."""
    found: list[float] = []
    with open_watched(world, store, VALUES | values) as builder:
        own = OwnRun(builder)
        plain = network()
        model, _ = own.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        if way == "average":
            average = AveragedModel(plain)
            own.register("swa", average)
        for step in own.steps(TensorDataset(X, Y)):
            for x, y in step:
                assert not plain[1]._forward_pre_hooks, "nothing slows down a step"
                if way == "inside":
                    own.sync_buffers()
                step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
            step.apply()
            between_steps(own, model, way, found)
            if way == "average":
                average.update_parameters(plain)
        # The loop is over, and its validation comes last.
        if way == "at the end":
            found.append(validate(model.eval()))
        own.close()
        return found, plain[1].running_mean.clone()


def between_steps(own: OwnRun, model: nn.Module, way: str, found: list[float]) -> None:
    if way == "eval" or (way == "only rank 0" and own.is_main):
        found.append(validate(model.eval()))
    elif way == "samples" and own.is_main:
        validate(model)
    elif way == "samples after sync":
        own.sync_buffers()
        validate(model)
    elif way == "frozen":
        # The first layer alone, which has no statistics.
        model[0](X)
    model.train()


@pytest.mark.parametrize("way", ["eval", "only rank 0", "at the end"])
def test_an_own_loop_that_evaluates_by_itself_is_warned_once(pool: Pool, tmp_path: Path, way: str) -> None:
    pool.run(in_loop, {"run_dir": str(tmp_path)}, way, world=2)
    (reason,) = warnings_in(tmp_path)
    assert "in eval mode between two steps" in reason


def test_a_compiled_model_is_noticed_too() -> None:
    """Its code was traced before, and does not call the hooks of its layers."""
    model, reasons = network().eval(), []
    model.compile(backend="eager")
    model(X)
    forwards = UserForwards(model, [model[1]], 0, lambda event, reason: reasons.append(reason))
    forwards.watch([model[1]])
    model(X)
    model(X)
    assert len(reasons) == 1
    forwards.end()
    assert not model[1]._forward_pre_hooks


def test_a_forward_in_train_mode_between_steps_is_named_as_the_cause(pool: Pool, tmp_path: Path) -> None:
    pool.run(in_loop, {"run_dir": str(tmp_path)}, "samples", world=2)
    (reason,) = warnings_in(tmp_path)
    assert "the running statistics of 1 depend on the number of ranks: a forward between two steps" in reason
    assert "model.eval()" in reason
    assert "LayerDrop" not in reason


def test_after_a_sync_such_a_forward_counts_as_on_one_rank(pool: Pool, tmp_path: Path) -> None:
    ((_, expected),) = pool.run(in_loop, {}, "samples after sync", world=1)
    for _, mean in pool.run(in_loop, {"run_dir": str(tmp_path)}, "samples after sync", world=2):
        torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)
    assert not warnings_in(tmp_path)


def test_other_code_between_steps_causes_no_warning(pool: Pool, tmp_path: Path) -> None:
    pool.run(in_loop, {"run_dir": str(tmp_path)}, "frozen", world=2)
    assert not warnings_in(tmp_path)


def test_statistics_cannot_be_combined_inside_a_step(pool: Pool) -> None:
    errors = pool.errors(in_loop, {}, "inside", world=2)
    assert_user_errors(errors, "run.sync_buffers() was called inside step 1", "after step.apply()")


def test_an_average_that_differs_for_its_statistics_says_so(pool: Pool, tmp_path: Path) -> None:
    pool.run(in_loop, {"run_dir": str(tmp_path), "checkpoint.at_end": True}, "average", world=2)
    (reason,) = warnings_in(tmp_path)
    assert "the state of 'swa' differs between the ranks: rank 0's is saved" in reason
    assert "run.sync_buffers()" in reason
