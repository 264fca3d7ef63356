"""Worker processes do not change what is trained; errors of a dataset or collate name the sample and the way out."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate, get_worker_info

from lockstep.data.loader import BatchRequest, SampleReader
from lockstep.runtime.world import World
from lockstep.task import Loss, Task
from pool import Pool
from ranks.support import Trace, assert_user_errors, fit
from zoo import SLOW_TO_IMPORT

VALUES = {"global_batch": 4, "steps": 3, "data.shuffle": False, "log.progress": "off"}


class Seeing(Task):
    """Keeps the numbers of every micro-batch that it is shown."""

    def __init__(self, dataset: Any, collate: Any = None):
        self.dataset = dataset
        self.seen: list[list[float]] = []
        if collate:
            self.collate = collate

    def model(self) -> nn.Module:
        return nn.Linear(1, 1).double()

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def data(self) -> Any:
        return self.dataset

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        batch = batch[1] if isinstance(batch, list) else batch
        self.seen.append(batch.flatten().tolist())
        return Loss(model(batch.reshape(-1, 1).double()).sum(), len(batch))


def seen(world: World, store: Any, dataset: Any, values: dict[str, Any]) -> list[list[float]]:
    """A job: the micro-batches of this rank."""
    task = Seeing(dataset)
    fit(world, store, task, VALUES | values)
    return task.seen


# ---- the same steps -------------------------------------------------------------------------------------


class Numbers(IterableDataset):
    def __init__(self, length: int = 10):
        self.length = length

    def __iter__(self) -> Iterator[float]:
        return iter(map(float, range(self.length)))


@pytest.mark.parametrize(("size", "workers"), [(1, 3), (2, 2)])
def test_a_streams_steps_are_those_without_worker_processes(pool: Pool, size: int, workers: int) -> None:
    without = pool.run(seen, Numbers(23), {"steps": 7, "micro_batch": 2}, world=size)
    values = {"steps": 7, "micro_batch": 2, "data.workers": workers}
    assert pool.run(seen, Numbers(23), values, world=size) == without


def test_the_example_of_ten_samples(pool: Pool) -> None:
    (steps,) = pool.run(seen, Numbers(), {"data.workers": 2}, world=1)
    assert steps == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


class Lines(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randint(0, 11, (10, 6), generator=torch.Generator().manual_seed(4)))


class Reading(Seeing):
    """transformers' GPT-2 reads the ten samples of a stream."""

    def model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(5)
        size = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(**size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).double()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        logits = model(batch[:, :-1]).logits
        return Loss(cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"), batch[:, 1:].numel())


def test_a_model_of_transformers_reads_a_stream_as_in_plain_pytorch(pool: Pool) -> None:
    task = Reading(Lines())
    model = task.model()
    optimizer = task.optimizer(model)
    for batch in torch.stack(list(Lines())).split(4):
        loss = task.loss(model, batch)
        optimizer.zero_grad()
        (loss.total / loss.weight).backward()
        optimizer.step()

    pool.preload(*SLOW_TO_IMPORT)
    values = VALUES | {"data.workers": 2, "lr.schedule": "constant", "lr.warmup": 0, "clip.norm": None}
    for trace in pool.run(fit, task, values, world=2):
        for name, weight in model.named_parameters():
            assert (trace.steps[-1].weights[name] - weight.detach()).abs().max() <= 1e-12, name


class OpenFile(Dataset):
    """Seeks and reads in a file that it keeps open, as many datasets do."""

    def __init__(self, path: Path):
        self.path, self.file = path, None

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Tensor:
        self.file = self.file or self.path.open("rb", buffering=0)
        self.file.seek(8 * index)
        return torch.from_numpy(np.frombuffer(self.file.read(8), dtype=np.float64).copy())


def seen_in_file(world: World, store: Any, path: Path, named: bool, values: dict[str, Any]) -> list[list[float]]:
    dataset = OpenFile(path)
    if not named:
        dataset.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        dataset.file.write(path.read_bytes())
    dataset[0]  # opened in the rank, before the worker processes are forked
    return seen(world, store, dataset, values)


@pytest.mark.parametrize("named", [True, False])
def test_worker_processes_have_their_own_place_in_an_open_file(pool: Pool, tmp_path: Path, named: bool) -> None:
    path = tmp_path / "numbers"
    np.arange(400.0).tofile(path)
    values = {"global_batch": 40, "steps": 30, "data.workers": 3}
    (found,) = pool.run(seen_in_file, path, named, values, world=1)
    in_order = [float(i) for i in range(400)]
    assert found == [in_order[start : start + 40] for start in range(0, 400, 40)] * 3


class OwnGenerator(Dataset):
    """Draws from a generator of its own, which no seed of a sample reaches."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> float:
        return index + self.generator.random()


class SplitsItself(Numbers):
    def __iter__(self) -> Iterator[float]:
        info = get_worker_info()
        return iter(map(float, range(info.id if info else 0, self.length, info.num_workers if info else 1)))


class SplitsInParts(Numbers):
    """The example of torch's documentation: the first process reads what a single one would read first."""

    def __iter__(self) -> Iterator[float]:
        info = get_worker_info()
        share = self.length // info.num_workers if info else self.length
        start = info.id * share if info else 0
        return iter(map(float, range(start, start + share)))


class Reshuffled(Numbers):
    """Every worker process has an order of its own."""

    def __iter__(self) -> Iterator[float]:
        info = get_worker_info()
        return iter(np.random.default_rng(info.seed if info else 0).permutation(self.length).astype(float).tolist())


class OwnGeneratorInBatches(OwnGenerator):
    def __getitems__(self, ids: list[int]) -> list[float]:
        return [self[index] for index in ids]


class NeedsAWorker(OwnGenerator):
    def __getitem__(self, index: int) -> float:
        return index + 0.0 * get_worker_info().id  # pyrefly: ignore[missing-attribute]


class Counting:
    """A collate that treats every second batch otherwise."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: list[Any]) -> Tensor:
        self.calls += 1
        return default_collate(samples) + self.calls % 2


class Level(Dataset):
    level = 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> float:
        return float(index + self.level)


class Curriculum(Seeing):
    """Makes the samples harder in every step."""

    def after_step(self, run: Any, result: Any) -> None:
        self.dataset.level = 100 * run.steps_done


def test_what_worker_processes_would_change_is_refused(pool: Pool) -> None:
    errors = pool.errors(seen, OwnGenerator(), {"data.workers": 1}, world=2)
    assert_user_errors(errors, "a worker process reads different samples", "data.workers=0", "checks.first_batch=false")
    errors = pool.errors(seen, OwnGeneratorInBatches(), {"data.workers": 1}, world=1)
    assert_user_errors(errors, "a worker process reads different samples")
    errors = pool.errors(fit, Seeing(Level(), Counting()), VALUES | {"data.workers": 2}, world=1)
    assert_user_errors(errors, "a worker process reads different samples")
    errors = pool.errors(seen, NeedsAWorker(), {"data.workers": 1}, world=1)
    assert_user_errors(errors, "this rank cannot read the samples", "'NoneType' object", "get_worker_info() is None")
    for stream in (SplitsItself(40), SplitsInParts(40), Reshuffled(40)):
        errors = pool.errors(seen, stream, {"data.workers": 2}, world=1)
        assert_user_errors(errors, "get_worker_info()", "data.sharding=own")
    errors = pool.errors(fit, Curriculum(Level()), VALUES | {"data.workers": 2}, world=1)
    assert_user_errors(errors, "the dataset's level was changed", "data.workers=0", "checks.first_batch=false")
    assert len(pool.run(seen, OwnGenerator(), {"data.workers": 1, "checks.first_batch": False}, world=1)[0]) == 3


class SplitsByRank(Numbers):
    def __iter__(self) -> Iterator[float]:
        return iter(map(float, range(torch.distributed.get_rank(), self.length, 2)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_splits_itself_by_rank_is_not_split_once_more(pool: Pool, workers: int) -> None:
    values = {"data.workers": workers}
    errors = pool.errors(seen, SplitsByRank(40), values, world=2)
    assert_user_errors(errors, "the stream begins with a different sample on rank 1", "data.sharding=own")
    one, two = pool.run(seen, SplitsByRank(40), values | {"data.sharding": "own"}, world=2)
    assert one == [[0, 2], [4, 6], [8, 10]]
    assert two == [[1, 3], [5, 7], [9, 11]]
    # A single worker process of a rank may have an order of its own: it is the same on all ranks.
    one, two = pool.run(seen, Reshuffled(12), {"data.workers": 1}, world=2)
    assert sorted(number for batch in one + two for number in batch) == list(range(12))


class OpenedLate(Dataset):
    """Connects when it is first read; 1 if the connection is this process's own."""

    opened_by = 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> float:
        self.opened_by = self.opened_by or os.getpid()
        return float(self.opened_by == os.getpid())


class Connected(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.port: socket.socket | None = None


def seen_connected(world: World, store: Any, dataset: Any, values: dict[str, Any]) -> list[list[float]]:
    dataset.port = socket.socket()
    with dataset.port:
        return seen(world, store, dataset, values)


def test_worker_processes_share_no_connection(pool: Pool) -> None:
    (found,) = pool.run(seen, OpenedLate(), {"data.workers": 2}, world=1)
    assert found == [[1.0] * 4] * 3
    for dataset in (Connected(), Level()):
        errors = pool.errors(seen_connected, dataset, {"data.workers": 1}, world=1)
        assert_user_errors(errors, "the dataset's port is an open connection", "data.workers=0")
    assert pool.run(seen_connected, Connected(), {}, world=1)[0][0] == [0, 1, 2, 3]


# ---- errors ---------------------------------------------------------------------------------------------


class Rows(Dataset):
    """Twelve numbers; the sample 6 is `odd`, or raises it."""

    def __init__(self, odd: Any):
        self.odd = odd

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == 6 and isinstance(self.odd, Exception):
            raise self.odd
        return self.odd if index == 6 else (torch.ones(2), index)


ODD = {
    "none": (None, ("the dataset returned None for sample 6 in epoch 0", "Task.collate")),
    "longer": ((torch.ones(2), 6, 7), ("sample 6 has a different structure from sample 4", "tuple of 3")),
    "shape": ((torch.ones(3), 6), ("sample 6 has a different structure from sample 4", "(3,)", "padding")),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ODD)
def test_a_sample_that_does_not_fit_is_named(pool: Pool, kind: str, workers: int) -> None:
    odd, words = ODD[kind]
    values = VALUES | {"data.workers": workers}
    assert_user_errors(pool.errors(fit, Seeing(Rows(odd)), values, world=1), *words)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_raises_is_named(pool: Pool, workers: int) -> None:
    (error,) = pool.errors(seen, Rows(OSError("no such picture")), {"data.workers": workers}, world=1)
    assert isinstance(error, OSError)
    told = "\n".join([str(error), *getattr(error, "__notes__", [])])
    assert "no such picture" in told
    assert "this is sample 6 in epoch 0" in told


def locks(samples: list[Any]) -> Any:
    return [default_collate([row[1] for row in samples]), threading.Lock()]


def test_a_batch_that_cannot_be_sent_is_refused_and_not_waited_for(pool: Pool) -> None:
    errors = pool.errors(fit, Seeing(Rows((torch.ones(2), 6)), locks), VALUES | {"data.workers": 1}, world=1)
    assert_user_errors(errors, "cannot send its batch", "lock", "data.workers=0")


# ---- micro-batches that a collate empties ---------------------------------------------------------------


class Holes(Dataset):
    """Samples 0 to 3 and 10 to 11 are missing: whole micro-batches of two are empty, and one is half empty."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> float | None:
        return None if index in (0, 1, 2, 3, 10, 11, 12) else float(index)


def nothing(samples: list[Any]) -> Any:
    left = [sample for sample in samples if sample is not None]
    return default_collate(left) if left else None


def no_rows(samples: list[Any]) -> Any:
    return torch.tensor([sample for sample in samples if sample is not None], dtype=torch.float64)


def weights(traces: list[Trace]) -> list[Tensor]:
    return [note.weights["weight"] for note in traces[0].steps]


@pytest.mark.parametrize(
    ("collate", "ranks", "values"),
    [(nothing, 2, {}), (no_rows, 3, {"strategy": "fsdp"}), (nothing, 2, {"data.workers": 1})],
)
def test_a_micro_batch_that_collate_empties_weighs_nothing(
    pool: Pool, collate: Any, ranks: int, values: dict[str, Any]
) -> None:
    settings = VALUES | {"global_batch": 6, "micro_batch": 2, "steps": 4}
    one = pool.run(fit, Seeing(Holes(), collate), settings, world=1)
    assert [note.result.weight for note in one[0].steps] == [2, 4, 5, 6]
    many = pool.run(fit, Seeing(Holes(), collate), settings | values, world=ranks)
    assert [note.result.weight for note in many[0].steps] == [2, 4, 5, 6]
    if "strategy" not in values:
        torch.testing.assert_close(weights(many), weights(one), rtol=1e-12, atol=1e-12)


def test_an_id_outside_of_a_tensor_dataset_is_named() -> None:
    reader = SampleReader(TensorDataset(torch.zeros(4, 2)), default_collate, seed=0)
    with pytest.raises(IndexError) as error:
        reader(BatchRequest(1, [2, 9]))
    assert "this is samples 2, 9 in epoch 1" in error.value.__notes__[0]
