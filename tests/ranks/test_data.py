"""Which sample, when, exactly once: the same at any world size, with the same randomness in it."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from lockstep.engine import loop
from lockstep.runtime.world import World
from lockstep.task import Loss, Task
from pool import Pool
from ranks.support import (
    Trace,
    TrainedBatch,
    WeightedRegression,
    assert_exact,
    assert_user_errors,
    fit,
    open_watched,
    weighted_regression,
)

WORLDS = (1, 2, 3, 4)


class Collector(Task):
    """Trains next to nothing and keeps every batch that it is shown."""

    def __init__(self, dataset: Any):
        self.dataset = dataset
        self.batches: list[list[Tensor]] = []

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def data(self) -> Any:
        return self.dataset

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        columns = list(batch) if isinstance(batch, list | tuple) else [batch]
        self.batches.append(columns)
        return Loss(model(columns[0][:, None].float()).sum(), len(columns[0]))


@dataclass
class Seen:
    """One micro-batch as the loss saw it; the first column is the sample's id."""

    step: int
    piece: TrainedBatch
    columns: list[list[float]]

    @property
    def ids(self) -> list[int]:
        return [int(i) for i in self.columns[0]]


def collect(world: World, store: Any, dataset: Any, values: dict[str, Any]) -> list[Seen]:
    task = Collector(dataset)
    trace = fit(world, store, task, values)
    pieces = [(number, piece) for number, note in enumerate(trace.steps) for piece in note.pieces]
    return [
        Seen(number, piece, [column.tolist() for column in columns])
        for (number, piece), columns in zip(pieces, task.batches, strict=True)
    ]


def counted(all_ranks: list[list[Seen]]) -> list[Seen]:
    """What counts: padding only keeps a rank in step."""
    return [seen for rank in all_ranks for seen in rank if not seen.piece.padding]


def ids_by(key: str, all_ranks: list[list[Seen]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for seen in counted(all_ranks):
        found.setdefault(seen.step if key == "step" else seen.piece.epoch, []).extend(seen.ids)
    return found


class Ids(Dataset):
    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


# ---- order ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", ["short", "drop"])
def test_every_epoch_visits_every_sample_once(pool: Pool, tail: str) -> None:
    length, batch = 37, 8
    steps = 3 * (length // batch if tail == "drop" else -(-length // batch))
    values = {"global_batch": batch, "micro_batch": 2, "steps": steps, "tail": tail}
    by_world = {size: pool.run(collect, Ids(length), values, world=size) for size in WORLDS}
    epochs = ids_by("epoch", by_world[1])
    for epoch in range(3):
        if tail == "short":
            assert sorted(epochs[epoch]) == list(range(length))
        else:
            assert len(epochs[epoch]) == len(set(epochs[epoch])) == length // batch * batch
    assert len({tuple(order) for order in epochs.values()}) == 3, "an epoch repeated the order of another"
    one = {step: sorted(ids) for step, ids in ids_by("step", by_world[1]).items()}
    for size, all_ranks in by_world.items():
        assert {step: sorted(ids) for step, ids in ids_by("step", all_ranks).items()} == one, f"world {size}"
        for seen in counted(all_ranks):
            assert seen.ids == seen.piece.ids, "the data is not that of the ids"


def test_a_micro_batch_is_the_same_slice_wherever_it_runs(pool: Pool) -> None:
    values = {"global_batch": 12, "micro_batch": 2, "steps": 5}

    def slices(size: int) -> dict[tuple[int, int], list[int]]:
        all_ranks = pool.run(collect, Ids(30), values, world=size)
        return {(seen.step, seen.piece.index): seen.ids for seen in counted(all_ranks)}

    one = slices(1)
    assert len(one) == 2 * 6 + 3 + 2 * 6
    assert all(slices(size) == one for size in WORLDS)


def test_the_seed_and_shuffle_decide_the_order(pool: Pool) -> None:
    def order(**values: Any) -> list[int]:
        settings = {"global_batch": 8, "steps": 5} | values
        return ids_by("epoch", pool.run(collect, Ids(40), settings, world=1))[0]

    assert order(seed=1) == order(seed=1)
    assert order(seed=1) != order(seed=2)
    assert order(seed=1) != list(range(40))
    assert order(**{"data.shuffle": False}) == list(range(40))


# ---- randomness -----------------------------------------------------------------------------------------


class Augmented(Ids):
    """Draws from all three global generators, as augmentation code does."""

    def __getitem__(self, index: int) -> tuple[int, Tensor, float, float]:
        return index, torch.rand((), dtype=torch.float64), random.random(), np.random.rand()


def draws(pool: Pool, world: int, workers: int = 0) -> dict[tuple[int, int], tuple[float, ...]]:
    """(epoch, sample) -> what it drew."""
    values = {"global_batch": 6, "micro_batch": 2, "steps": 8, "data.workers": workers}
    all_ranks = pool.run(collect, Augmented(20), values, world=world)
    return {
        (seen.piece.epoch, int(row[0])): row[1:]
        for seen in counted(all_ranks)
        for row in zip(*seen.columns, strict=True)
    }


def test_the_randomness_of_a_sample_belongs_to_the_sample(pool: Pool) -> None:
    one = draws(pool, world=1)
    assert sorted(one) == [(epoch, index) for epoch in (0, 1) for index in range(20)]
    assert draws(pool, world=2) == one
    assert draws(pool, world=3) == one
    assert draws(pool, world=2, workers=2) == one
    for generator in range(3):
        values = [row[generator] for row in one.values()]
        assert len(set(values)) == len(values), "two samples, or two epochs, drew the same number"


class Dropped(WeightedRegression):
    """Keeps the dropout mask of every micro-batch."""

    masks: list[list[float]]

    def network(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.5), nn.Linear(16, 1), nn.Flatten(0))

    def terms(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y, weight = batch
        return (weight * (model(x) - y) ** 2).sum(), weight.sum()


def masks(world: World, store: Any, task: Dropped, values: dict[str, Any]) -> tuple[Trace, list[Any]]:
    found: list[list[float]] = []

    def network() -> nn.Module:
        model = Dropped.network(task)
        model[1].register_forward_hook(lambda module, args, out: found.append((out == 0).flatten().tolist()))
        return model

    task.network = network
    trace = fit(world, store, task, values)
    pieces = [(step, piece) for step, note in enumerate(trace.steps) for piece in note.pieces]
    rows = zip(pieces, found, strict=True)
    return trace, [((step, piece.index), mask) for (step, piece), mask in rows if not piece.padding]


def test_dropout_is_the_same_at_any_world_size(pool: Pool) -> None:
    task = Dropped(weighted_regression(32, seed=6, zeros=0.0).tensors)
    values = {"global_batch": 8, "micro_batch": 2, "steps": 6}
    runs = {size: pool.run(masks, task, values, world=size) for size in (1, 2, 3)}
    by_micro = {size: dict(row for _, rows in found for row in rows) for size, found in runs.items()}
    assert len(by_micro[1]) == 24
    assert len({tuple(mask) for mask in by_micro[1].values()}) == 24, "two micro-batches had the same mask"
    assert by_micro[2] == by_micro[1]
    assert by_micro[3] == by_micro[1]
    one = runs[1][0][0].steps[-1].weights
    for size in (2, 3):
        for trace, _ in runs[size]:
            for name, weight in trace.steps[-1].weights.items():
                torch.testing.assert_close(weight, one[name], rtol=1e-5, atol=1e-6)


# ---- reading --------------------------------------------------------------------------------------------


class Doubling(Collector):
    def collate(self, samples: list[Any]) -> Any:
        return [2 * torch.stack([sample[0] for sample in samples])]


def collated(world: World, store: Any, values: dict[str, Any]) -> list[float]:
    task = Doubling(TensorDataset(torch.arange(8)))
    fit(world, store, task, values)
    return [value for batch in task.batches for value in batch[0].tolist()]


def test_the_tasks_collate_is_used_for_tensor_datasets_too(pool: Pool) -> None:
    values = {"global_batch": 8, "steps": 1}
    for size in (1, 2):
        all_ranks = pool.run(collated, values, world=size)
        assert sorted(value for rank in all_ranks for value in rank) == list(range(0, 16, 2))


def loaders_left(world: World, store: Any, dataset: Any) -> int:
    values = {"global_batch": 4, "micro_batch": 1, "steps": 2, "data.workers": 2}
    with open_watched(world, store, values) as builder:
        loop.fit(Collector(dataset), builder)
        return len(multiprocessing.active_children())


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_finished_run_leaves_no_loader_process(pool: Pool, kind: str) -> None:
    """Left to the garbage collector, each of them holds it up for five seconds."""
    dataset = {"map": Ids(64), "stream": Stream(64)}[kind]
    assert pool.run(loaders_left, dataset, world=1) == [0]


# ---- streams --------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """0 .. length - 1; in later epochs the same, moved by 1000."""

    def __init__(self, length: int):
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(1000 * self.epoch, 1000 * self.epoch + self.length))


@pytest.mark.parametrize(("length", "workers"), [(24, 0), (29, 0), (37, 0), (29, 2)])
def test_a_stream_is_read_once_by_all_ranks_together(pool: Pool, length: int, workers: int) -> None:
    """29 and 37 samples end on the ranks at different steps; the early ones wait without counting."""
    values = {"global_batch": 12, "micro_batch": 1, "steps": 9, "data.workers": workers}
    for size in (1, 2, 3, 4) if workers == 0 else (2,):
        all_ranks = pool.run(collect, Stream(length), values, world=size)
        epochs = ids_by("epoch", all_ranks)
        assert sorted(epochs[0]) == list(range(length)), f"world {size}"
        assert sorted(epochs[1]) == list(range(1000, 1000 + length)), f"world {size}"


class StreamedRows(IterableDataset):
    def __init__(self, tensors: list[Tensor]):
        self.tensors = tensors

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(list(zip(range(len(self.tensors[0])), *self.tensors, strict=True)))


class StreamedRegression(WeightedRegression):
    def data(self) -> Any:
        self.batches: list[list[int]] = []
        return StreamedRows(self.tensors)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        ids, *rows = batch
        self.batches.append(ids.tolist())
        return super().loss(model, rows)


def streamed(world: World, store: Any, task: StreamedRegression, values: dict[str, Any]) -> Trace:
    trace = fit(world, store, task, values)
    batches = iter(task.batches)
    for note in trace.steps:
        for piece in note.pieces:
            piece.ids = next(batches)
    return trace


@pytest.mark.parametrize("world", WORLDS)
def test_the_gradient_stays_exact_where_a_stream_ends(pool: Pool, world: int) -> None:
    task = StreamedRegression(weighted_regression(31, seed=7).tensors)
    values = {"global_batch": 12, "micro_batch": 3 if world != 3 else 2, "steps": 7}
    traces = pool.run(streamed, task, values, world=world)
    samples = [[i for trace in traces for i in trace.steps[step].ids] for step in range(7)]
    assert_exact(task, traces, samples)
    assert sorted(i for step in samples[:3] for i in step) == list(range(31))


def test_a_stream_that_should_shard_itself_and_does_not(pool: Pool) -> None:
    values = {"global_batch": 4, "micro_batch": 1, "steps": 2, "data.sharding": "own"}
    errors = pool.errors(collect, Stream(40), values, world=2)
    assert_user_errors(errors, "ranks 0 and 1 read the same first batch", "data.sharding=own")


class OwnShards(Stream):
    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__())[dist.get_rank() :: dist.get_world_size()])


def test_a_stream_that_shards_itself(pool: Pool) -> None:
    values = {"global_batch": 4, "micro_batch": 1, "steps": 9, "data.sharding": "own"}
    assert sorted(ids_by("epoch", pool.run(collect, OwnShards(16), values, world=2))[0]) == list(range(16))


class Shuffled(IterableDataset):
    """Shuffles itself, each time again, with generators that training draws from as well; and augments."""

    def __iter__(self) -> Iterator[Tensor]:
        order = list(range(24))
        random.shuffle(order)
        order = [order[i] for i in torch.randperm(24).tolist()]
        for index in order:
            yield torch.tensor([float(index), torch.rand(()).item(), random.random()])


class KeepsRows(Task):
    def __init__(self) -> None:
        self.rows: list[list[float]] = []

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5))

    def data(self) -> Any:
        return Shuffled()

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        self.rows += batch.tolist()
        return Loss(model(batch).sum(), len(batch))


def rows_of(world: World, store: Any, values: dict[str, Any]) -> list[list[float]]:
    task = KeepsRows()
    fit(world, store, task, values)
    return task.rows


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_stream_that_shuffles_itself_is_assigned_once(pool: Pool, size: int, workers: int) -> None:
    """Two epochs: every sample once in each, in another order, with other random numbers."""
    values = {"global_batch": 12, "micro_batch": 2, "steps": 4, "data.workers": workers}
    rows = [row for rank in pool.run(rows_of, values, world=size) for row in rank]
    assert sorted(row[0] for row in rows) == sorted([float(i) for i in range(24)] * 2)
    assert len({row[1] for row in rows}) == len({row[2] for row in rows}) == 48


def test_a_stream_with_fewer_samples_than_ranks(pool: Pool) -> None:
    """One rank has nothing at all to work on, not even padding: every rank raises."""
    values = {"global_batch": 4, "micro_batch": 1, "steps": 2}
    assert_user_errors(
        pool.errors(collect, Stream(3), values, world=4), "rank 3 of 4 got no sample of the stream in epoch 0"
    )


class OnceOnly(Stream):
    """A generator: the second epoch finds it empty."""

    def set_epoch(self, epoch: int) -> None:
        self.length = 0 if epoch else self.length


def test_a_stream_that_can_be_read_only_once(pool: Pool) -> None:
    values = {"global_batch": 4, "micro_batch": 1, "steps": 9}
    assert_user_errors(pool.errors(collect, OnceOnly(10), values, world=2), "got no sample of the stream in epoch 1")


def test_a_stream_cannot_be_assigned_unevenly(pool: Pool) -> None:
    errors = pool.errors(collect, Stream(30), {"global_batch": 7, "micro_batch": 1, "steps": 2}, world=2)
    assert_user_errors(errors, "global_batch=7", "multiple of 2 ranks")
