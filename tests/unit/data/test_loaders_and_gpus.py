"""Worker processes and GPUs: refused in words before the first step. The device `meta` stands for a GPU here, and an
error with torch's words for a GPU that a forked process touches."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from data_sources import source_options
from lockstep.config import DataConfig
from lockstep.data.sources import open_source
from lockstep.errors import UserError
from lockstep.runtime.preemption import WORKER_NAME

FORKED = "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use 'spawn'"


def on_device(index: int) -> Any:
    return {"x": torch.ones(3, device="meta"), "index": index}


def in_a_fork(index: int) -> Any:
    raise RuntimeError(FORKED)


def in_the_driver(index: int) -> Any:
    # What an operation on a tensor says that the dataset has kept on the GPU since before the fork.
    raise RuntimeError("CUDA error: initialization error\nCUDA kernel errors might be reported asynchronously")


class Rows:
    def __init__(self, read: Callable[[int], Any]):
        self.read = read

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.read(index)


class Stream(IterableDataset):
    def __init__(self, read: Callable[[int], Any]):
        self.read = read

    def __iter__(self) -> Iterator[Any]:
        return (self.read(index) for index in range(4))


def first_batch(data: Any, collate: Callable[[list[Any]], Any], workers: int) -> Any:
    source: Any = open_source(data, collate, source_options(4, 2, config=DataConfig(workers=workers)))
    try:
        return next(iter(source.take().micro_batches)).data
    finally:
        source.close()


@pytest.mark.parametrize("kind", [Rows, Stream])
@pytest.mark.parametrize(("read", "found"), [(on_device, "meta"), (in_a_fork, "forked"), (in_the_driver, "CUDA error")])
def test_a_dataset_that_uses_a_gpu_in_a_loader_process_is_refused(kind: Any, read: Any, found: str) -> None:
    with pytest.raises(UserError, match=r"a worker process can neither compute on a GPU") as refused:
        first_batch(kind(read), list, workers=1)
    assert found in refused.value.found
    assert "data.workers=0" in refused.value.fix


@pytest.mark.parametrize("kind", [Rows, Stream])
def test_so_is_a_collate_that_moves_its_batch(kind: Any) -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.ones(len(samples), device="meta")

    with pytest.raises(UserError, match="a worker process can neither compute on a GPU") as refused:
        first_batch(kind(float), collate, workers=1)
    assert "a tensor on meta" in refused.value.found

    # Without worker processes nothing is sent.
    assert first_batch(kind(float), collate, workers=0).device.type == "meta"


@pytest.mark.parametrize("kind", [Rows, Stream])
def test_other_errors_stay_what_they_are_and_leave_no_process(kind: Any) -> None:
    def read(index: int) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    # The traceback holds the DataLoader: Python would wait at its exit for worker processes that are still alive.
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        first_batch(kind(read), list, workers=1)
    assert not [process for process in multiprocessing.active_children() if process.name == WORKER_NAME]
    del raised
