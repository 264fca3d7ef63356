"""Batches that are copied to a GPU one ahead: the same as on a CPU, in time, and none kept. See fake_cuda.py."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from data_sources import source_options
from fake_cuda import FakeGpu, fake_gpu
from lockstep.config import DataConfig
from lockstep.data.sources import open_source
from lockstep.task import BatchSource

MICRO = 4


class Numbers(Dataset[Tensor]):
    """20 samples, of which one may be missing. It notes what was read."""

    def __init__(self, missing: int | None = None):
        self.missing = missing
        self.read: list[int] = []

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        if index == self.missing:
            raise OSError(f"no sample {index}")

        self.read.append(index)
        return torch.full((3,), float(index))


class Stream(IterableDataset[Tensor]):
    """The same as a stream."""

    def __init__(self, missing: int | None = None):
        self.rows = Numbers(missing)
        self.read = self.rows.read

    def __iter__(self) -> Iterator[Tensor]:
        return (self.rows[index] for index in range(len(self.rows)))


KINDS = [Numbers, Stream]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    yield fake_gpu(monkeypatch)
    gc.collect()  # sources leave iterators behind, which wait for their copies: while there is a fake to ask


def opened(data: Any, device: str, **config: Any) -> BatchSource:
    options = source_options(8, MICRO, config=DataConfig(**config), device=device)
    return open_source(data, torch.stack, options)


def micros(source: BatchSource, steps: int, each: Callable[[list[float]], None] = lambda ids: None) -> list[Any]:
    """Take steps, as a run does, and return what their micro-batches hold, with a None after each step."""
    found: list[Any] = []
    for step in range(steps):
        batches = source.take()
        for micro in batches:
            found.append((micro.data[:, 0].tolist(), micro.num_samples, micro.padding, micro.epoch))
            each(found[-1][0])
        # The result of a step tells a stream that its epoch has ended.
        result: Any = type("Result", (), {"exhausted": batches.exhausted, "step": step})
        batches.step = step
        source.commit(batches, result)
        found.append(None)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pin_memory", ["auto", False])
def test_the_same_batches_as_on_a_cpu(kind: Any, pin_memory: Any, gpu: FakeGpu) -> None:
    """Three epochs, whose last step is short. What has not arrived is nan."""
    expected = micros(opened(kind(), "cpu"), 8)
    assert micros(opened(kind(), "cuda", pin_memory=pin_memory), 8) == expected
    assert bool(gpu.pinned) == (pin_memory == "auto")
    assert len({ids[0] for found in expected if found for ids in [found[0]]}) > 3


def test_a_source_that_goes_back_drops_what_was_copied_ahead(gpu: FakeGpu) -> None:
    found = []
    for device in ("cpu", "cuda"):
        source = opened(Numbers(), device)
        first = micros(source, 1)
        state = source.state_dict()
        later = micros(source, 2)
        source.load_state_dict(state)
        again = micros(source, 2)
        assert again == later
        found.append((first, later))
    assert found[0] == found[1]


def test_a_step_that_was_not_committed_is_taken_again(gpu: FakeGpu) -> None:
    source = opened(Numbers(), "cuda")
    first = [micro.data.tolist() for micro in source.take()]
    assert [micro.data.tolist() for micro in source.take()] == first


@pytest.mark.parametrize("kind", KINDS)
def test_at_most_one_micro_batch_is_read_and_copied_ahead(kind: Any, gpu: FakeGpu) -> None:
    data, used = kind(), []

    def use(ids: list[float]) -> None:
        used.append(ids)
        ahead.append(gpu.calls.count("copy 1 copies") - len(used))

    ahead: list[int] = []
    micros(opened(data, "cuda", shuffle=False), 2, use)
    # A stream is copied ahead within a step only.
    assert ahead == ([1, 1, 1, 1] if kind is Numbers else [1, 0, 1, 0])
    assert len(data.read) <= 5 * MICRO


@pytest.mark.parametrize("kind", KINDS)
def test_each_copy_begins_behind_the_work_and_is_waited_for_before_its_use(kind: Any, gpu: FakeGpu) -> None:
    micros(opened(kind(), "cuda"), 1, lambda ids: gpu.calls.append("use"))
    sent = ["copy 1 waits for compute", "copy 1 copies"]
    first = [*sent, *sent, "compute waits", "use"]
    assert gpu.calls == [*first, *(sent if kind is Numbers else []), "compute waits", "use"]


def test_what_is_dropped_is_waited_for_before_its_memory_is_used_again(gpu: FakeGpu) -> None:
    """At the end of a run, and where a step has failed."""
    source = opened(Numbers(), "cuda")
    batches = iter(source.take())
    next(batches)
    assert gpu.calls.count("compute waits") == 1
    del batches
    source.close()
    assert gpu.calls.count("compute waits") == gpu.calls.count("copy 1 copies") == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("missing", range(0, 20, 4))
def test_an_error_of_the_dataset_comes_in_its_own_step(kind: Any, missing: int, gpu: FakeGpu) -> None:
    """Though the batch was read one micro-batch, and perhaps one step, before."""

    def seen_on(device: str) -> list[list[float]]:
        seen: list[list[float]] = []
        with pytest.raises(Exception, match=f"no sample {missing}"):
            micros(opened(kind(missing), device, shuffle=False), 3, seen.append)
        return seen

    assert seen_on("cuda") == seen_on("cpu")

    # A stream reads a whole step at once, and one sample more.
    if kind is Numbers:
        assert [ids[0] for ids in seen_on("cuda")] == list(range(0, missing, MICRO))


@pytest.mark.parametrize("kind", KINDS)
def test_no_batch_is_kept_alive(kind: Any, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device are the micro-batch in use and the next one, whose copy is on its way."""
    made: list[weakref.ref[Tensor]] = []
    copy_later = gpu.copy_later

    def noted(target: Tensor, source: Tensor) -> Tensor:
        made.append(weakref.ref(target))
        return copy_later(target, source)

    monkeypatch.setattr(gpu, "copy_later", noted)
    alive = []

    def look(ids: list[float]) -> None:
        alive.append(sum(ref() is not None for ref in made))

    source = opened(kind(), "cuda")
    micros(source, 4, look)
    assert max(alive) == 2
    source.close()
    assert sum(ref() is not None for ref in made) == 0
