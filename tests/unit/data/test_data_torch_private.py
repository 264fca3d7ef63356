"""What `lockstep.data.torch_private` uses of torch's DataLoader is there, and does what its names say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lockstep.data.torch_private import forget_worker, pin_other, shut_down_workers, worker_processes


class KnowsItsWorker(IterableDataset):
    def __iter__(self) -> Iterator[bool]:
        yield get_worker_info() is not None
        forget_worker()
        yield get_worker_info() is not None


def test_worker_processes_are_found_and_end() -> None:
    loader = DataLoader([1, 2, 3, 4], num_workers=2)
    batches = iter(loader)
    processes = worker_processes(loader, batches)
    assert [process.is_alive() for process in processes] == [True, True]

    shut_down_workers(batches)
    assert [process.is_alive() for process in processes] == [False, False]


def test_without_worker_processes_there_are_none() -> None:
    loader = DataLoader([1, 2])
    assert worker_processes(loader, iter(loader)) == []


def test_a_worker_process_can_forget_that_it_is_one() -> None:
    assert list(DataLoader(KnowsItsWorker(), batch_size=None, num_workers=1)) == [True, False]


class Mixed(list):
    """A sequence with tensors: torch pins these one by one."""


def test_tensors_in_other_containers_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    def lock(tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return tensor + 1

    monkeypatch.setattr(torch.Tensor, "pin_memory", lock)
    unknown = object()
    pinned = pin_other(Mixed([torch.zeros(1), "text", unknown]))
    assert (float(pinned[0]), pinned[1], pinned[2]) == (1.0, "text", unknown)
