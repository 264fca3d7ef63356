"""State with a tensor for each parameter, of a class that Lockstep does not know: one line saves it with the run."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.engine.own_loop import OwnRun
from lockstep.engine.setup import open_run
from lockstep.errors import Preempted, UserError
from lockstep.observe.sinks import read_jsonl
from lockstep.runtime import context
from lockstep.runtime.shards import full_tensor
from pool import Pool
from ranks.support import configured
from ranks.test_strategies import Ragged

BASE = {"global_batch": 10, "micro_batch": 2, "steps": 6, "exact": True, "threads": 1, "resume": "auto"}


class MeanWeights:
    """Stochastic weight averaging: the mean of the weights after each step, and of how many steps it is."""

    def __init__(self, model: nn.Module):
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameter_tensors = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.count = 0

    @torch.no_grad()
    def update(self) -> None:
        self.count += 1
        for name, mean in self.parameter_tensors.items():
            mean.add_((self.parameters[name] - mean) / self.count)

    @torch.no_grad()
    def restart(self, names: Collection[str]) -> None:
        for name in names:
            self.parameter_tensors[name].copy_(self.parameters[name])

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Averaged(NamedTuple):
    count: int
    means: dict[str, Tensor]
    by_hand: dict[str, Tensor]  # the means, from the weights after each step that was not undone
    estimate: int  # the bytes of a checkpoint that are known before the first step


def averaged(
    world: Any,
    store: Any,
    values: dict[str, Any],
    leave_at: int | None = None,
    registers: bool = True,
    nan_at: int | None = None,
) -> Averaged:
    """A job: a loop that averages its weights. Return the averages when it ends or leaves."""
    resolved = configured(BASE | values)
    with context.start(world, resolved.config, store=store) as runtime:
        builder, task = open_run(resolved, runtime, "test"), Ragged()
        own, plain = OwnRun(builder), task.model()
        model, optimizer = own.setup(plain, task.optimizer(plain))
        swa = MeanWeights(plain)
        weights = {0: whole_weights(swa)}
        if registers:
            own.register("swa", swa)
        try:
            for step in own.steps(task.data()):
                if step.index + 1 == leave_at:
                    runtime.notice.signal = "SIGTERM"
                factor = float("nan") if step.index == nan_at else 1.0
                nan_at = None if step.index == nan_at else nan_at
                for batch in step:
                    loss = task.loss(model, batch)
                    step.backward(loss.total * factor, loss.weight)
                step.apply(optimizer)
                swa.update()
                weights[own.steps_done] = whole_weights(swa)
            own.close()
        except Preempted:
            pass
        assert builder.run is not None
        estimate = builder.run.checkpoints.state.bytes_without_optimizers(runtime)
        means = {name: full_tensor(mean) for name, mean in swa.parameter_tensors.items()}
        by_hand = {name: mean_of([weights[step][name] for step in sorted(weights)]) for name in means}
        return Averaged(swa.count, means, by_hand, estimate)


def whole_weights(swa: MeanWeights) -> dict[str, Tensor]:
    return {name: full_tensor(p).detach().clone() for name, p in swa.parameters.items()}


def mean_of(values: list[Tensor]) -> Tensor:
    """Return the mean of all but the first, in the operations of `MeanWeights`."""
    mean, *others = values
    for count, value in enumerate(others, start=1):
        mean = mean + (value - mean) / count
    return mean


@pytest.fixture(scope="module")
def whole(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Averaged:
    """The averages of a run that nothing interrupts."""
    (found,) = pool.run(averaged, {"run_dir": str(tmp_path_factory.mktemp("whole"))}, world=1)
    return found


def assert_same(found: list[Averaged], expected: Averaged) -> None:
    for rank in found:
        assert rank.count == expected.count
        assert rank.means.keys() == expected.means.keys()
        assert all(torch.equal(mean, expected.means[name]) for name, mean in rank.means.items())


@pytest.mark.parametrize(
    ("before", "after"), [(("ddp", 1), ("ddp", 2)), (("ddp", 1), ("fsdp", 2)), (("fsdp", 2), ("ddp", 1))]
)
def test_it_resumes_on_any_number_of_ranks(
    pool: Pool, whole: Averaged, tmp_path: Path, before: tuple[str, int], after: tuple[str, int]
) -> None:
    left = pool.run(averaged, {"run_dir": str(tmp_path), "strategy": before[0]}, 3, world=before[1])
    assert [rank.count for rank in left] == [3] * before[1]
    assert_same(pool.run(averaged, {"run_dir": str(tmp_path), "strategy": after[0]}, world=after[1]), whole)


@pytest.mark.parametrize(("strategy", "world"), [("ddp", 1), ("fsdp", 2)])
def test_a_rewind_restores_it(pool: Pool, tmp_path: Path, strategy: str, world: int) -> None:
    """The fifth step is not applied, and the run goes back to the checkpoint of the third."""
    values = {"checkpoint.every": 3, "nonfinite.policy": "rewind", "strategy": strategy, "run_dir": str(tmp_path)}
    found = pool.run(averaged, values, None, True, 4, world=world)
    [event] = [event for event in read_jsonl(tmp_path / "events.jsonl") if event["event"] == "rewind"]
    assert (event["step"], event["to"]) == (5, 3)
    for rank in found:
        assert_same([rank], rank._replace(count=6, means=rank.by_hand))


def test_its_bytes_are_in_the_estimate(pool: Pool, whole: Averaged, tmp_path: Path) -> None:
    (without,) = pool.run(averaged, {"run_dir": str(tmp_path)}, None, False, world=1)
    assert whole.estimate == without.estimate + sum(mean.nbytes for mean in whole.means.values())


def test_a_run_may_begin_to_keep_it_and_cease(pool: Pool, tmp_path: Path) -> None:
    values = {"run_dir": str(tmp_path), "exact": False}
    pool.run(averaged, values, 2, False, world=1)
    (begun,) = pool.run(averaged, values, 4, world=1)
    assert begun.count == 2
    pool.run(averaged, values, None, False, world=1)
    lines = [event["facts"].get("resumed") for event in read_jsonl(tmp_path / "events.jsonl") if "facts" in event]
    assert f"swa: {len(begun.means)} tensors not in the checkpoint, starting afresh" in lines[1]
    assert lines[2].endswith("changed since: swa: in the checkpoint, but not in use here")


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    """A part of it fitted into a smaller one, and was restored without a word."""

    class Counts:
        def __init__(self, size: int):
            self.parameter_tensors = {"weight": torch.ones(size)}

        def restart(self, names: Collection[str]) -> None: ...

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def train(size: int) -> None:
        with lockstep.start(run_dir=tmp_path, resume="auto", steps=2, global_batch=2, log={"progress": "off"}) as run:
            net = nn.Linear(2, 1)
            model, _ = run.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
            run.register("counts", Counts(size))
            for step in run.steps(torch.ones(8, 2)):
                for batch in step:
                    step.backward(model(batch).sum(), weight=len(batch))
                step.apply()

    train(10)
    with pytest.raises(UserError, match=r"'counts.weight' has shape \(10,\) in the checkpoint and \(5,\) in this run"):
        train(5)


def on_one_rank(world: Any, store: Any, values: dict[str, Any], rank: int) -> None:
    """A job whose rank `rank` alone registers something."""
    resolved = configured(BASE | values)
    with context.start(world, resolved.config, store=store) as runtime:
        builder, task = open_run(resolved, runtime, "test"), Ragged()
        own, plain = OwnRun(builder), task.model()
        own.setup(plain, task.optimizer(plain))
        if world.rank == rank:
            own.register("swa", MeanWeights(plain))
        try:
            next(iter(own.steps(task.data())))
        except BaseException as error:
            builder.fail(error)
            raise


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_alone_registers_is_refused(pool: Pool, tmp_path: Path, rank: int) -> None:
    """The first save failed with a KeyError, or left the state out."""
    for error in pool.errors(on_one_rank, {"run_dir": str(tmp_path)}, rank, world=2):
        assert isinstance(error, UserError)
        assert error.problem == f"'swa' is saved with the run by rank {rank}, but not by rank {1 - rank}"


def test_its_tensors_do_not_take_the_names_of_others(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with lockstep.start(global_batch=4, steps=1, run_dir=tmp_path / "run") as run:
        for name in ("model", "optimizer", "stateful", "extra", "data"):
            with pytest.raises(UserError, match=f"'{name}' cannot be saved with the run: the name is taken"):
                run.register(name, MeanWeights(model))
