"""The moving average of the weights: the same on any number of ranks and with any strategy, saved and exported."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lockstep.checkpoint import command
from lockstep.checkpoint.choose import choose
from lockstep.engine import loop
from lockstep.engine.setup import open_run
from lockstep.errors import Preempted, UserError
from lockstep.optim.weight_average import WeightAverage
from lockstep.runtime import context
from lockstep.task import Loss
from pool import Pool
from ranks.support import ALL_PAIRS, configured, preempted_run
from ranks.test_strategies import BASE, STRATEGIES, Ragged, assert_close, kind, worlds

DECAY = 0.75
EMA = {"ema.decay": DECAY, "evaluate.every": 2}


class Reference:
    """Averages by hand, on one process."""

    def __init__(self) -> None:
        self.averages: dict[str, Tensor] = {}

    def before_training(self, run: Any) -> None:
        self.averages = {name: p.detach().clone() for name, p in run.model.named_parameters() if p.requires_grad}

    def after_step(self, run: Any, result: Any) -> None:
        parameters = dict(run.model.named_parameters())
        self.averages = {
            name: average * DECAY + parameters[name].detach() * (1 - DECAY) for name, average in self.averages.items()
        }


def averaged(world: Any, store: Any, name: str, values: dict[str, Any], leave_at: int | None = None) -> Any:
    """A job: train with an average. Return the summary, and what one process averaged by hand."""
    reference = Reference()
    resolved = configured(BASE | STRATEGIES[name] | EMA | values)
    with context.start(world, resolved.config, store=store) as runtime:
        builder = open_run(resolved, runtime, "test", run_class=preempted_run(runtime, leave_at))
        if world.alone:
            builder.callbacks.append(reference)
        try:
            return loop.fit(kind(name)(), builder), reference.averages
        except Preempted:
            return None


class Clipped(Ragged):
    """Its hook changes the weights."""

    def after_step(self, run: Any, result: Any) -> None:
        with torch.no_grad():
            for p in run.model.parameters():
                p.clamp_(-0.05, 0.05)


def clipped(world: Any, store: Any, values: dict[str, Any]) -> dict[str, Tensor]:
    """A job: train with an average and a hook. Return what was averaged by hand, after that hook."""
    reference = Reference()
    resolved = configured(BASE | EMA | values)
    with context.start(world, resolved.config, store=store) as runtime:
        builder = open_run(resolved, runtime, "test")
        builder.callbacks.append(reference)
        loop.fit(Clipped(), builder)
        return reference.averages


def test_weights_are_averaged_as_hooks_leave_them(pool: Pool, tmp_path: Path) -> None:
    (expected,) = pool.run(clipped, {"run_dir": str(tmp_path)}, world=1)
    found = load_file(tmp_path / "ema.safetensors")
    assert all(torch.equal(found[name], average) for name, average in expected.items())


class Wobbly(Ragged):
    """The loss of step 1 is infinite, and step 2 has weight 0."""

    def before_training(self, run: Any) -> None:
        self.run = run

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        made = super().loss(model, batch)
        if self.run.steps_done == 2:
            return Loss(made.total * 0, made.weight * 0)

        return Loss(made.total * (math.inf if self.run.steps_done == 1 else 1), made.weight)


class AppliedOnly(Reference):
    """Averages by hand, of the steps that were applied."""

    def __init__(self) -> None:
        super().__init__()
        self.applied: list[bool] = []

    def after_step(self, run: Any, result: Any) -> None:
        self.applied.append(result.applied)
        if result.applied:
            super().after_step(run, result)


def wobbly(world: Any, store: Any, values: dict[str, Any]) -> AppliedOnly:
    """A job: train with an average and with steps that are skipped. Return what was averaged by hand."""
    reference = AppliedOnly()
    resolved = configured(BASE | EMA | values)
    with context.start(world, resolved.config, store=store) as runtime:
        builder = open_run(resolved, runtime, "test")
        builder.callbacks.append(reference)
        loop.fit(Wobbly(), builder)
        return reference


@pytest.mark.parametrize("world", [1, 2])
def test_a_skipped_step_leaves_the_averages(pool: Pool, tmp_path: Path, world: int) -> None:
    expected = pool.run(wobbly, {"run_dir": str(tmp_path), "steps": 4}, world=world)[0]
    assert expected.applied == [True, False, False, True]
    found = load_file(tmp_path / "ema.safetensors")
    assert all(torch.equal(found[name], average) for name, average in expected.averages.items())


def test_a_step_that_the_device_skips_leaves_the_averages() -> None:
    """The device knows it before the host does. A step that it applies has the bits of one that the host applies."""
    generator = torch.Generator().manual_seed(0)
    model = nn.ParameterDict(
        {
            name: torch.randn(33, generator=generator).to(dtype)
            for name, dtype in (("a", torch.float32), ("b", torch.float64), ("c", torch.bfloat16), ("d", torch.float32))
        }
    )
    on_host, on_device = WeightAverage(model, 0.999), WeightAverage(model, 0.999)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        return zip(on_host.parameter_tensors.values(), on_device.parameter_tensors.values(), strict=True)

    # Skipped: the host does nothing, and the device multiplies by 1 and adds 0.
    before = [average.clone() for average in on_host.parameter_tensors.values()]
    on_host.update(not_applied=True)
    on_device.update(not_applied=torch.tensor(True))
    assert all(
        torch.equal(one, other) and torch.equal(one, old) for (one, other), old in zip(pairs(), before, strict=True)
    )

    on_host.update(not_applied=False)
    on_device.update(not_applied=torch.tensor(False))
    assert all(torch.equal(one, other) for one, other in pairs())
    assert not any(torch.equal(one, old) for (one, _), old in zip(pairs(), before, strict=True))


@pytest.fixture(scope="module")
def single(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("single")
    (found,) = pool.run(averaged, "ddp", {"run_dir": str(folder)}, world=1)
    return folder, found


def test_the_average_is_the_one_by_hand(single: tuple[Path, Any]) -> None:
    folder, (_, averages) = single
    saved = load_file(folder / "ema.safetensors")
    plain = load_file(folder / "model.safetensors")
    assert all(torch.equal(saved[name], average) for name, average in averages.items())
    assert saved.keys() == plain.keys()
    assert not torch.equal(saved["embed.weight"], plain["embed.weight"])

    # Frozen parameters are in the file as well.
    frozen = saved.keys() - averages.keys()
    assert frozen
    assert all(torch.equal(saved[name], plain[name]) for name in frozen)


SOME = [("fsdp-grads", "pp"), ("pp", "fsdp-grads")]
RING = list(zip(STRATEGIES, [*list(STRATEGIES)[1:], "ddp"], strict=True))


@pytest.mark.parametrize(("before", "after"), RING if ALL_PAIRS else SOME)
def test_every_strategy_averages_evaluates_and_saves_the_same(
    pool: Pool, single: tuple[Path, Any], tmp_path: Path, before: str, after: str
) -> None:
    """A run that leaves after three steps, and goes on with another strategy."""
    folder, (summary, _) = single
    values = {"run_dir": str(tmp_path)}
    pool.run(averaged, before, values, 3, world=worlds(before)[0])
    found = pool.run(averaged, after, values | {"resume": "auto"}, world=worlds(after)[0])
    for file in ("ema.safetensors", "model.safetensors"):
        assert_close(load_file(tmp_path / file), load_file(folder / file))
    assert found[0][0]["eval_loss"] == pytest.approx(summary["eval_loss"], rel=1e-5)

    # The averages can be exported from the checkpoint, in place of the weights.
    command.export(tmp_path, choose(tmp_path), tmp_path / "out", ema=True)
    assert_close(load_file(tmp_path / "out" / "ema.safetensors"), load_file(folder / "ema.safetensors"))


def test_stages_that_stay_gathered_are_gathered_again_after_averages_were_evaluated(
    pool: Pool, single: tuple[Path, Any], tmp_path: Path
) -> None:
    """An evaluation leaves the averages gathered. The step that follows must not compute with them."""
    folder, (summary, _) = single
    values = {"run_dir": str(tmp_path), "strategy": "fsdp-grads"}
    found = pool.run(averaged, "pp x fsdp", values, world=4)
    for file in ("ema.safetensors", "model.safetensors"):
        assert_close(load_file(tmp_path / file), load_file(folder / file))
    assert found[0][0]["eval_loss"] == pytest.approx(summary["eval_loss"], rel=1e-5)


def test_with_exact_the_bits_do_not_depend_on_the_ranks_nor_on_a_resume(pool: Pool, tmp_path: Path) -> None:
    values = {"exact": True, "threads": 1}
    pool.run(averaged, "fsdp", values | {"run_dir": str(tmp_path / "a")}, world=1)
    pool.run(averaged, "fsdp", values | {"run_dir": str(tmp_path / "b")}, 3, world=2)
    pool.run(averaged, "ddp", values | {"run_dir": str(tmp_path / "b"), "resume": "auto"}, world=3)
    for file in ("ema.safetensors", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_run_may_begin_to_average_and_cease(pool: Pool, tmp_path: Path) -> None:
    values = {"run_dir": str(tmp_path)}
    pool.run(averaged, "ddp", values | {"ema.decay": None}, 3, world=1)
    (found,) = pool.run(averaged, "ddp", values | {"resume": "auto"}, world=1)
    saved = load_file(tmp_path / "ema.safetensors")
    assert all(torch.equal(saved[name], average) for name, average in found[1].items())

    with pytest.raises(UserError, match=r"no averages(.|\n)*without ema\.decay"):
        command.export(tmp_path, choose(tmp_path, 2), tmp_path / "out", ema=True)
