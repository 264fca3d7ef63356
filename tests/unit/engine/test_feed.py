"""Micro-batches on their way from the source to the step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.engine.run import Run
from lockstep.errors import UserError
from lockstep.start_check.data import take_and_compare
from lockstep.task import BatchSource, MicroBatch, StepBatches


def test_a_source_that_gives_another_number_of_micro_batches_than_it_announced_is_named() -> None:
    run: Any = SimpleNamespace(
        runtime=SimpleNamespace(heartbeat=SimpleNamespace(beat=lambda *_: None), notice=SimpleNamespace(waits=True)),
        steps_done=0,
        log=SimpleNamespace(interval=SimpleNamespace(data_wait_s=0.0, micro_batches=0)),
        driver=SimpleNamespace(parts=[]),
    )
    batches: Any = ["first", "second"]
    assert list(Run._feed(run, batches, 2)) == batches
    with pytest.raises(UserError, match="announced 3 micro-batches and gave 2"):
        list(Run._feed(run, batches, 3))
    with pytest.raises(UserError, match="announced 1 micro-batch and gave more"):
        list(Run._feed(run, batches, 1))
    # Without a micro-batch there is nothing to reduce.
    with pytest.raises(UserError, match="announced 0 micro-batches for step 1; every rank needs at least one"):
        list(Run._feed(run, [], 0))


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
