"""Losses over the global batch of a stream: a rank finds its rows among those of all ranks, on any number of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, default_collate

from lockstep import Sampled, Shards
from lockstep.engine.own_loop import OwnRun
from lockstep.errors import UserError
from lockstep.runtime.world import World
from lockstep.task import BatchSource, Loss, MicroBatch, StepBatches, StepResult, Task
from pool import Pool
from ranks.support import assert_user_errors, open_watched
from ranks.test_callbacks import BASE, trained

ROWS = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
VALUES = {"global_batch": 8, "micro_batch": 8, "steps": 9, "data.shuffle": False, "clip.norm": 0.1}


class Pairs(Task):
    """Each sample must be found among the other samples of the global batch."""

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4))

    def before_training(self, run: Any) -> None:
        self.run = run

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        one, other = model(batch), model(batch + 0.1)
        scores = one @ self.run.all_gather(other).T
        labels = self.first() + torch.arange(len(batch))
        return Loss(F.cross_entropy(scores, labels, reduction="sum"), len(batch))

    def first(self) -> int:
        return self.run.row_offset


class Stream(IterableDataset):
    def __init__(self, rows: Tensor = ROWS[:18]):
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows)


class PlainStream(Pairs):
    def data(self) -> Any:
        return Stream()


# By virtual shard; they end at different times: shard 0 after the first step, shard 2 within the third.
FILES = [list(range(2)), list(range(10, 18)), list(range(20, 25)), list(range(30, 38))]


class UnevenShards(Pairs):
    def data(self) -> Any:
        return Shards(FILES, shards=4).map(lambda number: ROWS[number])


class OneShard(Pairs):
    """Its last batch of an epoch has two samples."""

    def data(self) -> Any:
        return Shards([list(range(18))], shards=1).map(lambda number: ROWS[number])


def without_some(samples: list[Tensor]) -> Any:
    return default_collate([sample for sample in samples if sample[0] > -0.5])


class Dropping(Pairs):
    """Its collate drops rows, more of them on one rank than on another."""

    collate = staticmethod(without_some)

    def data(self) -> Any:
        return list(ROWS[:18])


class ByPlace(PlainStream):
    """It takes the place in the global batch for the place among the rows."""

    def first(self) -> int:
        return self.run.sample_offset


class ShardsByPlace(UnevenShards):
    first = ByPlace.first


class OneShardByPlace(OneShard):
    first = ByPlace.first


class TooEarly(PlainStream):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        labels = self.run.row_offset + torch.arange(len(batch))
        scores = model(batch) @ self.run.all_gather(model(batch)).T
        return Loss(F.cross_entropy(scores, labels, reduction="sum"), len(batch))


class OwnSource(BatchSource):
    """Half of the global batch for each of two ranks. It leaves out where that is."""

    def __init__(self) -> None:
        self.position = 0

    def attach(self, context: Any) -> None:
        self.mine = context.mine

    def take(self) -> StepBatches:
        micros = [MicroBatch(ROWS[4 * index : 4 * index + 4], index=index, num_samples=4) for index in self.mine]
        return StepBatches(len(micros), micros, global_num_samples=8)

    def commit(self, batches: StepBatches, result: StepResult | None) -> None:
        self.position += 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class BalancedByPlace(Pairs):
    """Micro-batches of about the same cost, whose samples lie anywhere in the global batch."""

    defaults = {"data.balance": "length"}
    first = ByPlace.first

    def data(self) -> Any:
        return Sampled(list(ROWS[:18]), lengths=range(1, 19))


class FromOwnSource(ByPlace):
    def data(self) -> Any:
        return OwnSource()


def test_rows_of_a_rank_are_found_among_those_of_all_ranks(pool: Pool) -> None:
    """Where shards have ended, or collate has dropped samples, a rank's rows begin before its place in the batch."""
    for task in (PlainStream(), UnevenShards(), OneShard(), Dropping()):
        (one,) = pool.run(trained, task, VALUES, world=1)
        for world, strategy in ((2, "ddp"), (2, "fsdp"), (4, "ddp")):
            values = VALUES | {"micro_batch": 8 // world, "strategy": strategy}
            for trace in pool.run(trained, task, values, world=world):
                found = [(note.result.weight, note.result.grad_norm) for note in trace.steps]
                expected = [(note.result.weight, pytest.approx(note.result.grad_norm, rel=1e-4)) for note in one.steps]
                assert found == expected, (task, world, strategy)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("task", [ByPlace(), ShardsByPlace(), BalancedByPlace(), FromOwnSource()])
def test_a_place_in_the_global_batch_that_nobody_knows_is_refused(pool: Pool, task: Task, world: int) -> None:
    """It was 0 on every rank of a stream, so that rank 1 learned from the labels of rank 0."""
    values = {name: value for name, value in VALUES.items() if name != "data.shuffle"} | {"micro_batch": 8 // world}
    errors = pool.errors(trained, task, values | task.defaults, world=world)
    assert_user_errors(errors, "the data source has no places in the global batch", "use run.row_offset")


def test_a_single_shard_has_places(pool: Pool) -> None:
    (one,) = pool.run(trained, OneShardByPlace(), VALUES | {"steps": 2}, world=1)
    for trace in pool.run(trained, OneShardByPlace(), VALUES | {"steps": 2, "micro_batch": 4}, world=2):
        assert [note.result.grad_norm for note in trace.steps] == pytest.approx(
            [note.result.grad_norm for note in one.steps], rel=1e-4
        )


def places_by_hand(world: World, store: Any, task: Task, values: dict[str, Any]) -> list[tuple[int, int]]:
    """A job: a custom loop. Return (place, first row of this rank) of each batch; a place is no more outside of it."""
    with open_watched(world, store, BASE | values) as builder:
        own = OwnRun(builder)
        plain = task.model()
        model, _ = own.setup(plain, task.optimizer(plain))
        found = []
        for step in own.steps(task.data(), task.collate):
            for batch in step:
                rows = own.all_gather(model(batch))
                found.append((step.sample_offset, own.row_offset))
                step.backward(rows[own.row_offset :][: len(batch)].sum(), len(batch))

            step.apply()
            with pytest.raises(UserError, match="outside of the batches of step"):
                print(step.sample_offset)

        own.close()
        return found


def test_a_custom_loop_knows_both(pool: Pool) -> None:
    assert pool.run(places_by_hand, Dropping(), VALUES | {"steps": 2}, world=1) == [[(0, 0), (0, 0)]]
    first, second = pool.run(places_by_hand, Dropping(), VALUES | {"steps": 2, "micro_batch": 4}, world=2)
    assert first == [(0, 0), (0, 0)]

    # Its place follows four samples, and its rows those that collate has kept of them.
    kept = [sum(float(row[0]) > -0.5 for row in ROWS[start : start + 4]) for start in (0, 8)]
    assert second == [(4, kept[0]), (4, kept[1])]
    assert kept != [4, 4]


def test_a_row_offset_belongs_to_the_last_gather(pool: Pool) -> None:
    for world in (1, 2):
        errors = pool.errors(trained, TooEarly(), VALUES | {"micro_batch": 8 // world}, world=world)
        assert_user_errors(errors, "run.row_offset was read before run.all_gather(rows)")
