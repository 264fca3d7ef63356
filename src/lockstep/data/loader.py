"""Reading samples, in this process or in worker processes, and moving batches to the device.

Random numbers are keyed by sample, so that a sample looks the same on every rank and in every worker. Batches for a GPU
are copied on a separate stream, one micro-batch ahead, while the GPU computes.
"""

from __future__ import annotations

import copy
import operator
import socket
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from lockstep.data.sample_errors import batch_to_send, explain_collate, is_empty, name_samples, unless_refused
from lockstep.data.worker_process import open_files, start_reading, start_worker
from lockstep.errors import UserError
from lockstep.runtime.seeds import derive, seed_everything
from lockstep.task import Task

NESTED = 8  # datasets within each other that are looked at


class Request(NamedTuple):
    """The samples of one micro-batch."""

    epoch: int
    ids: Sequence[int]

    @property
    def where(self) -> str:
        """The place that an error message names."""
        return f"in epoch {self.epoch}"


@dataclass
class SampleReader:
    """Turns a request into a collated batch."""

    dataset: Any
    collate: Callable[[list[Any]], Any]
    seed: int
    seed_samples: bool = True

    def __post_init__(self) -> None:
        self._plain = plain = is_plain(self.collate)
        if plain:
            self.collate = default_collate  # without the detour through the task

        # A Subset always has `__getitems__`, so the dataset in it decides.
        innermost = self.dataset
        while isinstance(innermost, Subset):
            innermost = innermost.dataset
        self._reads_in_batches = hasattr(innermost, "__getitems__")

        # The one dataset known to be nothing but indexing: one gather per tensor, nothing to collate.
        self._gathers = type(self.dataset) is TensorDataset and plain

    def __call__(self, request: Request) -> Any:
        # Indexing draws no random numbers: nothing is seeded.
        if self._gathers:
            rows = torch.from_numpy(np.asarray(request.ids))
            try:
                return [tensor[rows] for tensor in self.dataset.tensors]
            except IndexError as error:  # the user's sampler gave an id that the dataset does not have
                name_samples(error, rows.tolist(), request.where)
                raise
        ids = [int(i) for i in request.ids]
        return collate_named(self.collate, self.samples(request), ids, request.where, self._plain)

    def samples(self, request: Request) -> list[Any]:
        """Return the samples of a request, not collated."""
        ids = [int(i) for i in request.ids]
        if self._reads_in_batches:
            # One seed for all: the samples of a micro-batch are drawn together.
            self._seed(request.epoch, ids[0])
            return self._read(self.dataset.__getitems__, ids, ids, request.where)

        # Each sample has its own seed, so that it does not depend on those read before it.
        samples = []
        for index in ids:
            self._seed(request.epoch, index)
            samples.append(self._read(partial(operator.getitem, self.dataset), index, [index], request.where))
        return samples

    def read_again(self, request: Request) -> Any:
        """Read twice and return the second: a stateful dataset or collate then gives a different batch."""
        if not self._gathers:
            self(request)
        return self(request)

    def some_batch(self, size: int) -> Any:
        """Return a batch that is not empty, to compute with where a collate has left nothing."""
        for start in range(0, len(self.dataset), size):
            batch = self(Request(0, range(start, min(start + size, len(self.dataset)))))
            if not is_empty(batch):
                return batch
        raise UserError(
            f"collate leaves no sample of any batch of {size}",
            "None, or tensors of length 0, for all of the dataset",
            "return a batch from Task.collate for samples that are to be trained on",
        )

    def _read(self, read: Callable[[Any], Any], key: Any, ids: list[int], where: str) -> Any:
        try:
            return read(key)
        except Exception as error:
            name_samples(error, ids, where)
            raise

    def _seed(self, epoch: int, index: int) -> None:
        if self.seed_samples:
            seed_everything(derive(self.seed, "sample", epoch, index))


def is_plain(collate: Callable[[list[Any]], Any]) -> bool:
    """Whether it is torch's own collate, and not the user's."""
    return getattr(collate, "__func__", collate) in (Task.collate, default_collate)


def collate_named(
    collate: Callable[[list[Any]], Any], samples: list[Any], ids: list[int], where: str, plain: bool
) -> Any:
    """Make a batch of samples; an error names them."""
    try:
        return collate(samples)
    except UserError:
        raise
    except Exception as error:
        explained = explain_collate(error, samples, ids, where, plain)
        if explained is error:
            raise
        raise explained from error


# ---- worker processes ----


@dataclass
class _OneRequestPerItem(torch.utils.data.Dataset):
    """Lets torch's DataLoader carry whole requests to its workers."""

    reader: SampleReader
    sent: int = 0  # by this process

    def __getitem__(self, index: Request) -> Any:
        # Check only the first batch of each worker; the rest have the same structure.
        first = self.sent == 0
        self.sent += 1
        ids = [int(i) for i in index.ids]
        return batch_to_send(lambda: self.reader(index), ids, index.where, check=first)


def read_all(
    reader: SampleReader, requests: Iterator[Request], workers: int, prefetch: int, pin_memory: bool = False
) -> Iterator[Any]:
    """Return batches for `requests`, in their order. Each worker process reads `prefetch` requests ahead."""
    if not workers:
        batches = map(reader, requests)
        return map(pin, batches) if pin_memory else batches

    check_no_connection(reader.dataset)

    # To torch a request is the index of one sample, so that the order and the size of batches stay ours.
    loader = DataLoader(
        _OneRequestPerItem(reader),
        batch_sampler=([request] for request in requests),  # pyrefly: ignore[bad-argument-type]
        collate_fn=operator.itemgetter(0),
        num_workers=workers,
        prefetch_factor=prefetch,
        pin_memory=pin_memory,
        worker_init_fn=partial(start_worker, open_files()),
    )
    return map(unless_refused, start_reading(loader))


def plain_attributes(dataset: Any) -> dict[str, Any]:
    """Return what a worker process has a copy of: numbers, texts, lists and arrays that the dataset holds by name."""
    plain = (int, float, str, list, tuple, np.ndarray, Tensor)
    return {name: value for name, value in _attributes(dataset) if isinstance(value, plain)}


def check_no_connection(dataset: Any) -> None:
    """Refuse a connection in the dataset: forked processes would all use it, and get each other's answers."""
    for name, value in _attributes(dataset):
        if isinstance(value, socket.socket | Connection):
            raise UserError(
                f"the dataset's {name} is an open connection, which worker processes would share",
                f"{value!r}: answers to one process would reach another",
                "open it when a process reads its first sample, in __getitem__ or __iter__, and not before (compare "
                "os.getpid()); or type data.workers=0",
            )


def _attributes(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a dataset by name, those of its class first, and those of datasets inside it."""
    level = ""
    for _ in range(NESTED):
        classes = [vars(kind) for kind in reversed(type(dataset).__mro__)]
        for attributes in [*classes, getattr(dataset, "__dict__", {})]:
            yield from ((f"{level}{name}", value) for name, value in list(attributes.items()) if name[:2] != "__")
        # A Subset holds another dataset. One that looks its attributes up by itself may fail to.
        try:
            dataset, level = getattr(dataset, "dataset", None), f"{level}dataset."
        except Exception:
            return


# ---- to the device ----


def pin(batch: Any) -> Any:
    """Return the batch in page-locked memory, from where a copy to the GPU does not block the host.

    Tensors that a dataset keeps on a GPU stay there: only host memory can be locked.
    """
    from torch.utils.data._utils.pin_memory import pin_memory

    def locked(tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if tensor.device.type == "cpu" else tensor

    return _map_tensors(batch, locked, pin_memory, "pin_memory")


def to_device(batch: Any, device: torch.device, move: Callable[[Tensor], Tensor] | None = None) -> Any:
    """Move every tensor inside `batch`, asynchronously from pinned memory, or with `move`."""
    if device.type == "cpu":
        return batch

    def moved(tensor: Tensor) -> Tensor:
        # A subclass of Tensor has its own way of moving.
        if move and type(tensor) is Tensor:
            return move(tensor)
        return tensor.to(device, non_blocking=True)

    return _map_tensors(batch, moved, lambda other: other, "to", (device,))


def _map_tensors(
    batch: Any,
    change: Callable[[Tensor], Any],
    otherwise: Callable[[Any], Any],
    method: str,
    arguments: tuple[Any, ...] = (),
) -> Any:
    """Return `batch` with every tensor changed.

    An object that is neither a tensor nor a plain container is changed by its own method named `method`, if it has
    one. A mapping without that method is treated as a dict, and anything else is left to `otherwise`.
    """
    if isinstance(batch, Tensor):
        return change(batch)

    def inside(values: Iterable[Any]) -> Iterator[Any]:
        return (_map_tensors(value, change, otherwise, method, arguments) for value in values)

    # A named tuple takes its fields as arguments, other sequences an iterable.
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*inside(batch))
    if isinstance(batch, list | tuple):
        return type(batch)(inside(batch))
    if not isinstance(batch, dict) and hasattr(batch, method):
        return getattr(batch, method)(*arguments)
    if isinstance(batch, Mapping):
        return _mapping_like(batch, dict(zip(batch, inside(batch.values()), strict=True)))

    return otherwise(batch)


def _mapping_like(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return `values` as a mapping of the same kind, with the other attributes of `batch`.

    A kind that cannot be made from a dict becomes a dict.
    """
    # A copy of these does not share their values.
    if isinstance(batch, dict | UserDict):
        changed = copy.copy(batch)
        changed.update(values)
        return changed

    try:
        return type(batch)(values)  # pyrefly: ignore
    except TypeError:
        return values


# ---- ahead of the GPU ----


def one_ahead(batches: Iterator[Any], stream: SideStream) -> Iterator[Any]:
    """Yield batches on the device, each after `stream` sent the next one.

    A batch that cannot be read raises its error in its turn, not one batch early.
    """
    # At most two batches are on their way: the one that is due, and the one after it.
    waiting: list[Any] = []
    problem: Exception | None = None
    try:
        while problem is None:
            try:
                waiting.append(stream.send(next(batches)))
            except Exception as error:  # or StopIteration
                problem = error

            if waiting and (problem or len(waiting) > 1):
                yield stream.receive(waiting.pop(0))

        if not isinstance(problem, StopIteration):
            raise problem
    finally:
        # Batches that are dropped: their memory must not be reused before the copy has ended.
        for sent in waiting:
            stream.receive(sent)


class SideStream:
    """Copies batches to the device on a separate CUDA stream.

    The memory of a batch belongs to the stream that computes: when the batch is no longer needed, its memory is reused
    by the batch after next, however far the host has run ahead. A copy therefore begins when the work that was queued
    before it is done, and overlaps with the work of the batch in between.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def send(self, batch: Any) -> tuple[Any, torch.Event]:
        """Queue a copy behind the work that the device has so far. The host does not wait."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        moved = to_device(batch, self.device, self._copy)
        return moved, self.stream.record_event()

    def receive(self, sent: tuple[Any, torch.Event]) -> Any:
        """Return the batch and have the computing stream wait for its copy. The host does not wait."""
        batch, arrived = sent
        torch.cuda.current_stream(self.device).wait_event(arrived)
        return batch

    def _copy(self, tensor: Tensor) -> Tensor:
        # A tensor on a GPU belongs to the computing stream: if another one read it, its memory might be reused before
        # the read has ended.
        if tensor.is_cuda:
            return tensor.to(self.device, non_blocking=True)

        # Memory comes from the computing stream, the copy runs on ours.
        copied = torch.empty_like(tensor, device=self.device)
        with torch.cuda.stream(self.stream):
            copied.copy_(tensor, non_blocking=True)
        return copied
