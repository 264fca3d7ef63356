"""Reading samples: in this process, or in worker processes. Randomness is keyed by sample, so it is the same
whichever rank or worker reads it."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from lockstep.runtime.seeds import derive, seed_everything
from lockstep.task import Task

Request = tuple[int, Sequence[int]]  # (epoch, sample ids) of one micro-batch


@dataclass
class SampleReader:
    """Turns a request into a collated batch."""

    dataset: Any
    collate: Callable[[list[Any]], Any]
    seed: int
    seed_samples: bool = True

    def __post_init__(self) -> None:
        self.plain_collate = getattr(self.collate, "__func__", self.collate) in (Task.collate, default_collate)

    def __call__(self, request: Request) -> Any:
        epoch, ids = request
        if type(self.dataset) is TensorDataset and self.plain_collate:
            # The one dataset known to be nothing but indexing: one gather per tensor, nothing to collate.
            rows = torch.from_numpy(np.asarray(ids))
            return [tensor[rows] for tensor in self.dataset.tensors]
        if _reads_in_batches(self.dataset):
            if self.seed_samples:  # one key for all: the samples of a micro-batch are drawn together
                seed_everything(derive(self.seed, "sample", epoch, int(ids[0])))
            return self.collate(self.dataset.__getitems__([int(i) for i in ids]))
        return self.collate([self._sample(epoch, int(i)) for i in ids])

    def _sample(self, epoch: int, index: int) -> Any:
        if self.seed_samples:
            seed_everything(derive(self.seed, "sample", epoch, index))
        return self.dataset[index]


def _reads_in_batches(dataset: Any) -> bool:
    """Subset always offers `__getitems__`; only what lies below it tells whether batches are meant."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return hasattr(dataset, "__getitems__")


class _OneRequestPerItem(torch.utils.data.Dataset):
    """Lets torch's DataLoader carry whole requests to its workers."""

    def __init__(self, reader: SampleReader):
        self.reader = reader

    def __getitem__(self, index: Request) -> Any:
        return self.reader(index)


def _only(items: list[Any]) -> Any:
    return items[0]


def read_ahead(
    reader: SampleReader, requests: Iterator[Request], workers: int, prefetch: int, pin_memory: bool
) -> Iterator[Any]:
    """Batches for `requests`, in their order, made by worker processes; `prefetch` requests ahead for each."""
    loader = DataLoader(
        _OneRequestPerItem(reader),
        batch_sampler=([request] for request in requests),  # pyrefly: ignore[bad-argument-type]
        collate_fn=_only,
        num_workers=workers,
        prefetch_factor=prefetch,
        pin_memory=pin_memory,
        worker_init_fn=stay_with_the_rank,
    )
    return iter(loader)


LOADER_GRACE = 120.0  # seconds


def stay_with_the_rank(worker: int) -> None:
    """In a loader process: schedulers tell all processes of a job to leave, but a rank needs its loaders until it has
    saved. They go when it goes; after a SIGTERM, by themselves in the end."""
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _leave_later())


def _leave_later() -> None:
    timer = threading.Timer(LOADER_GRACE, os._exit, (0,))
    timer.daemon = True
    timer.start()


def read_all(reader: SampleReader, requests: Iterator[Request], workers: int, prefetch: int) -> Iterator[Any]:
    """Batches for `requests`, in their order."""
    return read_ahead(reader, requests, workers, prefetch, False) if workers else map(reader, requests)


def pin(batch: Any) -> Any:
    """In page-locked memory, from where a copy to the GPU does not hold up the host. What a dataset keeps on a GPU
    stays where it is: only host memory can be locked."""
    from torch.utils.data._utils.pin_memory import pin_memory

    def locked(tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if tensor.device.type == "cpu" else tensor

    return _each(batch, locked, pin_memory, "pin_memory")


def to_device(batch: Any, device: torch.device, move: Callable[[Tensor], Tensor] | None = None) -> Any:
    """Move every tensor inside `batch`; asynchronous from pinned memory. `move` may know another way."""
    if device.type == "cpu":
        return batch

    def moved(tensor: Tensor) -> Tensor:
        return move(tensor) if move and type(tensor) is Tensor else tensor.to(device, non_blocking=True)

    return _each(batch, moved, lambda other: other, "to", (device,))


def _each(
    batch: Any, change: Callable[[Tensor], Any], other: Callable[[Any], Any], own: str, arguments: tuple[Any, ...] = ()
) -> Any:
    """`batch` with every tensor changed. What is neither a tensor nor a plain container changes itself by its method
    `own`, if it has that; a mapping without it is taken for a dict, and the rest is left to `other`."""
    if isinstance(batch, Tensor):
        return change(batch)

    def inside(values: Iterable[Any]) -> Iterator[Any]:
        return (_each(value, change, other, own, arguments) for value in values)

    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*inside(batch))
    if isinstance(batch, list | tuple):
        return type(batch)(inside(batch))
    if not isinstance(batch, dict) and hasattr(batch, own):
        return getattr(batch, own)(*arguments)
    if isinstance(batch, Mapping):
        return _alike(batch, dict(zip(batch, inside(batch.values()), strict=True)))
    return other(batch)


def _alike(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """`values` as a mapping of the same kind, with whatever else `batch` has; a dict if its kind cannot be made."""
    if type(batch) is dict:
        return values
    if isinstance(batch, dict | UserDict):  # a copy of these does not share their values
        made = copy.copy(batch)
        made.update(values)
        return made
    kind: Callable[..., Mapping[Any, Any]] = type(batch)
    try:
        return kind(values)
    except TypeError:
        return values
