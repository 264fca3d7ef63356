"""Training on a stream in virtual shards: the same at any number of ranks, and exactly once after any resume."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import lockstep
from lockstep import Shards
from lockstep.engine import loop
from lockstep.engine.setup import open_run
from lockstep.engine.setup.data import gather_state
from lockstep.errors import Preempted, UserError
from lockstep.runtime import context
from lockstep.runtime.world import World
from lockstep.task import Loss, Task
from pool import Pool
from ranks.support import configured, preempted_run

STEPS = 13  # two epochs, and the beginning of a third
FILES = [list(range(100 * file, 100 * file + 6 + file % 3)) for file in range(8)]


def kept(number: int) -> bool:
    return number % 10 != 3


class Noisy(Task):
    """Regression on a stream with a filter, random noise, and dropout in the model."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[int]]] = []  # (epoch, numbers) of each micro-batch that counts

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 1))

    def data(self) -> Any:
        return Shards(FILES, shards=4).filter(kept).map(lambda number: (number, torch.rand(1)))

    def before_batch(self, run: Any, micro: Any) -> None:
        if not micro.padding:
            self.seen.append((micro.epoch, micro.data[0].tolist()))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        numbers, noise = batch
        x = numbers[:, None] / 800 + 0.01 * noise
        return Loss((model(x) - x.sin()).square().sum(), weight=len(x))


def train(world: World, store: Any, folder: Path, workers: int = 0, leave_at: int | None = None) -> Any:
    """A job: train in `folder`, from its newest checkpoint if it has one. Return what was seen, and the weights."""
    values = {
        "run_dir": str(folder),
        "resume": "auto",
        "steps": STEPS,
        "global_batch": 8,
        "micro_batch": 2,
        "lr.peak": 0.05,
        "data.workers": workers,
    }
    resolved = configured(values)
    task = Noisy()
    with context.start(world, resolved.config, store=store) as runtime:
        builder = open_run(resolved, runtime, "test", run_class=preempted_run(runtime, leave_at))
        if leave_at is None:
            loop.fit(task, builder)
        else:
            with pytest.raises(Preempted) as left:
                loop.fit(task, builder)
            assert left.value.step == leave_at
        assert builder.run is not None
        return task.seen, {name: p.detach().clone() for name, p in builder.run.driver.model.named_parameters()}


def seen_in_epochs(all_ranks: list[Any]) -> dict[int, list[int]]:
    epochs: dict[int, list[int]] = {}
    for seen, _ in all_ranks:
        for epoch, numbers in seen:
            epochs.setdefault(epoch, []).extend(numbers)
    return epochs


def assert_close(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return pool.run(train, tmp_path_factory.mktemp("alone") / "run", world=1)


def test_one_epoch_has_every_sample_once(alone: Any) -> None:
    expected = sorted(filter(kept, (number for file in FILES for number in file)))
    epochs = seen_in_epochs(alone)
    assert [sorted(epochs[epoch]) for epoch in (0, 1)] == [expected, expected]
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_train_the_same_model(pool: Pool, alone: Any, tmp_path: Path, world: int) -> None:
    together = pool.run(train, tmp_path / "run", world=world)
    assert_close(together[0][1], alone[0][1])
    by_epoch, expected = seen_in_epochs(together), seen_in_epochs(alone)
    assert {epoch: sorted(numbers) for epoch, numbers in by_epoch.items()} == {
        epoch: sorted(numbers) for epoch, numbers in expected.items()
    }


def test_a_run_goes_on_exactly_with_other_ranks_and_workers(pool: Pool, alone: Any, tmp_path: Path) -> None:
    route = [(1, 0, 3), (3, 0, 8), (2, 1, None)]
    parts = [
        seen_in_epochs(pool.run(train, tmp_path / "run", workers, leave_at, world=world))
        for world, workers, leave_at in route[:-1]
    ]
    last = pool.run(train, tmp_path / "run", 1, None, world=2)
    parts.append(seen_in_epochs(last))

    together: dict[int, list[int]] = {}
    for part in parts:
        for epoch, numbers in part.items():
            together.setdefault(epoch, []).extend(numbers)
    expected = {epoch: sorted(numbers) for epoch, numbers in seen_in_epochs(alone).items()}
    assert {epoch: sorted(numbers) for epoch, numbers in together.items()} == expected
    assert_close(last[0][1], alone[0][1])


# ---- streams with a state ----


def gather_states(world: World, store: Any) -> list[Any]:
    """A job: send a state with everything that a stream may keep, and nothing from rank 0."""
    state = {3: {"tokens": np.arange(world.rank, dtype=np.uint16), "mean": torch.tensor(0.5), "best": (math.inf, None)}}
    with context.start(world, configured({}).config, store=store) as runtime:
        return gather_state(runtime.collectives, state if world.rank else {})


def test_ranks_gather_states_with_arrays_and_tensors(pool: Pool) -> None:
    for nothing, of_rank1, of_rank2 in pool.run(gather_states, world=3):
        assert nothing == {}
        assert of_rank1[3]["tokens"].tolist() == [0]
        assert of_rank2[3]["tokens"].tolist() == [0, 1]
        assert of_rank2[3]["tokens"].dtype == np.uint16
        assert torch.equal(of_rank2[3]["mean"], torch.tensor(0.5))
        assert of_rank2[3]["best"] == (math.inf, None)


class Unsavable:
    """A stream whose state no checkpoint can hold."""

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        return ((number, torch.zeros(1)) for number in range(100))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1, 2}}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Given(Noisy):
    """The same task on another stream."""

    def __init__(self, stream: Any):
        super().__init__()
        self.stream = stream

    def data(self) -> Any:
        return self.stream


def test_a_state_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path: Path) -> None:
    task = Given(Unsavable())
    with pytest.raises(UserError, match=r"the state of the stream\S* cannot be saved: a set"):
        lockstep.fit(task, steps=3, global_batch=2, run_dir=tmp_path)
    assert task.seen == []


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_of_torchdata_over_a_stream(tmp_path: Path) -> None:
    loader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    plain = Shards(FILES[:1]).map(lambda number: (number, torch.zeros(1)))
    task = Given(loader(_Samples(list(plain)), batch_size=None))
    lockstep.fit(task, steps=3, global_batch=2, micro_batch=2, run_dir=tmp_path)
    assert task.seen == [(0, [0, 1]), (0, [2, 3]), (0, [4, 5])]


class _Samples(IterableDataset):
    def __init__(self, samples: list[Any]):
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)
