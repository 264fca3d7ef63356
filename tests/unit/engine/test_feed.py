"""Micro-batches on their way from the source to the step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.engine.hooks.all_gather import RowGathering
from lockstep.engine.run import Run
from lockstep.errors import UserError
from lockstep.start_check.data import take_and_compare
from lockstep.task import BatchSource, Loss, MicroBatch, StepBatches, Task


def test_a_source_that_gives_another_number_of_micro_batches_than_it_announced_is_named() -> None:
    run: Any = SimpleNamespace(
        runtime=SimpleNamespace(heartbeat=SimpleNamespace(beat=lambda *_: None), notice=SimpleNamespace(waits=True)),
        steps_done=0,
        gathering=RowGathering(),
        _waits_s=[],
        driver=SimpleNamespace(parts=[]),
    )
    batches: Any = ["first", "second"]
    assert list(Run._wait_for_each(run, batches, 2)) == batches
    with pytest.raises(UserError, match="announced 3 micro-batches and gave 2"):
        list(Run._wait_for_each(run, batches, 3))
    with pytest.raises(UserError, match="announced 1 micro-batch and gave more"):
        list(Run._wait_for_each(run, batches, 1))
    # Without a micro-batch there is nothing to reduce.
    with pytest.raises(UserError, match="announced 0 micro-batches for step 1; every rank needs at least one"):
        list(Run._wait_for_each(run, [], 0))


class Watched(Task):
    """Counts the micro-batches that are in memory when the next one is read."""

    def __init__(self) -> None:
        self.read: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def data(self) -> Any:
        return TensorDataset(torch.ones(24, 1))

    def collate(self, samples: list[Any]) -> torch.Tensor:
        self.alive.append(sum(tensor() is not None for tensor in self.read))
        batch = torch.stack([x for (x,) in samples])
        self.read.append(weakref.ref(batch))
        return batch

    def loss(self, model: nn.Module, batch: torch.Tensor) -> Loss:
        return Loss(model(batch).sum(), len(batch))


def test_no_micro_batch_outlives_its_backward(tmp_path: Path) -> None:
    task = Watched()
    settings = {"checks.loss": "off", "log": {"progress": "off"}, "compile": False}
    lockstep.fit(task, run_dir=tmp_path, global_batch=12, micro_batch=4, steps=2, **settings)
    assert task.alive == [0] * 6


class Counted(BatchSource):
    """Three micro-batches, each of which is made when it is asked for."""

    made: list[weakref.ref[Any]]

    def take(self) -> StepBatches:
        self.made = []
        return StepBatches(3, self._make(), 6)

    def _make(self) -> Iterator[MicroBatch]:
        for index in range(3):
            data = torch.full((2,), float(index))
            self.made.append(weakref.ref(data))
            yield MicroBatch(data, index, 2)
            del data

    def commit(self, batches: Any, result: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_the_first_step_keeps_one_micro_batch_in_memory() -> None:
    source = Counted()
    runtime: Any = SimpleNamespace(collectives=SimpleNamespace(all_gather_json=lambda value: [value]))
    for index, micro in enumerate(take_and_compare(source, runtime, 0)):
        assert micro.data[0] == index
        assert sum(data() is not None for data in source.made) == 1
    assert index == 2
