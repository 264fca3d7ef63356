"""Reads samples, in this process or in worker processes, and moves batches to the device.

Random numbers are seeded per sample, so that a sample is the same on every rank and in every worker. (A dataset with
`__getitems__` is seeded once per micro-batch, by its first id.) Batches of a map-style dataset for a GPU are
copied on a separate CUDA stream, one micro-batch ahead, while the GPU computes.
"""

from __future__ import annotations

import copy
import operator
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from lockstep.data.sample_errors import batch_to_send, explain_collate_error, name_samples
from lockstep.data.worker_copies import check_no_connection
from lockstep.data.worker_process import LoaderBatches, open_files, start_worker
from lockstep.errors import UserError
from lockstep.runtime.seeds import derive, seed_everything
from lockstep.task import Task


class Request(NamedTuple):
    """The samples of one micro-batch."""

    epoch: int
    ids: Sequence[int]

    @property
    def where(self) -> str:
        """Text for error messages."""
        return f"in epoch {self.epoch}"


@dataclass
class SampleReader:
    """Turns a request into a collated batch.

    It is used in the main process and in worker processes alike, and gives the same batch in both: random numbers that
    a dataset or a transform draws are seeded for each sample, by its id and the epoch. `seed_samples=False` leaves them
    alone.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    seed: int
    seed_samples: bool = True

    def __post_init__(self) -> None:
        # All of this is decided once: `__call__` runs for every micro-batch.
        self._default_collate = is_default_collate(self.collate)
        if self._default_collate:
            self.collate = default_collate  # Task.collate would only call it

        # A Subset always has `__getitems__`, so the dataset inside it decides.
        self.innermost = self.dataset
        while isinstance(self.innermost, Subset):
            self.innermost = self.innermost.dataset

        self._reads_in_batches = hasattr(self.innermost, "__getitems__")

        # A TensorDataset only indexes its tensors, so a batch takes one index operation per tensor.
        self._indexes_tensors = type(self.dataset) is TensorDataset and self._default_collate

    def __call__(self, request: Request) -> Any:
        """Return the collated batch of a request. It is the same in every process and after any other request."""
        # Indexing draws no random numbers, so no seed is needed.
        if self._indexes_tensors:
            rows = torch.from_numpy(np.asarray(request.ids))
            try:
                return [_gather(tensor, rows) for tensor in self.dataset.tensors]
            except IndexError as error:  # the user's sampler returned an id that the dataset does not have
                name_samples(error, rows.tolist(), request.where)
                raise

        ids = [int(i) for i in request.ids]
        return collate_samples(self.collate, self.samples(request), ids, request.where, self._default_collate)

    def samples(self, request: Request) -> list[Any]:
        """Return the samples of a request before collate."""
        ids = [int(i) for i in request.ids]
        if self._reads_in_batches:
            # One call reads all samples, so they share one seed.
            self._seed(request.epoch, ids[0])
            return self._read(self.dataset.__getitems__, ids, ids, request.where)

        # Each sample has its own seed, so that it does not depend on the samples read before it.
        samples = []
        for index in ids:
            self._seed(request.epoch, index)
            samples.append(self._read(partial(operator.getitem, self.dataset), index, [index], request.where))

        return samples

    def read_again(self, request: Request) -> Any:
        """Read the batch twice and return the second. If the dataset or collate keeps state, the two differ."""
        if not self._indexes_tensors:
            self(request)
        return self(request)

    def nonempty_batch(self, size: int) -> Any:
        """Return the first batch of `size` samples that collate does not empty, to run in place of an empty one."""
        for start in range(0, len(self.dataset), size):
            batch = self(Request(0, range(start, min(start + size, len(self.dataset)))))
            if not is_empty(batch):
                return batch

        raise UserError(
            f"collate drops all samples of every batch of {size}",
            "it returned None, or tensors of length 0, for the whole dataset",
            "return a batch from Task.collate for at least some samples",
        )

    def _read(self, read: Callable[[Any], Any], key: Any, ids: list[int], where: str) -> Any:
        """Call a function of the dataset or collate; an error gets the ids of the samples."""
        try:
            return read(key)
        except Exception as error:  # the dataset is the user's code
            name_samples(error, ids, where)
            raise

    def _seed(self, epoch: int, index: int) -> None:
        if self.seed_samples:
            seed_everything(derive(self.seed, "sample", epoch, index))


def _gather(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return `tensor[rows]`; `rows` has shape (samples,)."""
    # `index_select` is faster, but its result is always contiguous: it would lose channels_last.
    return tensor.index_select(0, rows) if tensor.is_contiguous() else tensor[rows]


def is_default_collate(collate: Callable[[list[Any]], Any]) -> bool:
    """Return whether this is torch's default_collate, or Task.collate, which calls it."""
    return getattr(collate, "__func__", collate) in (Task.collate, default_collate)


def collate_samples(
    collate: Callable[[list[Any]], Any], samples: list[Any], ids: list[int], where: str, is_default: bool
) -> Any:
    """Return `collate(samples)`. An error gets the ids of the samples."""
    try:
        return collate(samples)
    except UserError:
        raise
    except Exception as error:  # collate is the user's code
        explained = explain_collate_error(error, samples, ids, where, is_default)
        if explained is error:
            raise

        raise explained from error


def is_empty(batch: Any) -> bool:
    """Return whether collate dropped all samples: the batch is None, or all its tensors have length 0."""
    if batch is None:
        return True

    # Usually the first tensor has samples, and the others need not be examined.
    has_tensors = False
    for tensor in _tensors(batch):
        if tensor.dim() and tensor.shape[0]:
            return False

        has_tensors |= tensor.dim() > 0

    return has_tensors


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors inside a batch. torch's pytree does not look into mappings other than dicts."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from _tensors(list(batch.values()))
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)


# ---- worker processes ----


@dataclass
class _OneRequestPerItem(torch.utils.data.Dataset):
    """A dataset for torch's DataLoader whose index is a whole request and whose item is a collated batch."""

    reader: SampleReader
    sent: int = 0  # batches that this worker has sent

    def __getitem__(self, index: Request) -> Any:
        # Check only the first batch of each worker, because pickling takes time: later batches have the same structure.
        is_first = self.sent == 0
        self.sent += 1
        ids = [int(i) for i in index.ids]
        return batch_to_send(lambda: self.reader(index), ids, index.where, check=is_first)


def read_all(
    reader: SampleReader, requests: Iterator[Request], workers: int, prefetch: int, pin_memory: bool = False
) -> Iterator[Any]:
    """Return batches for `requests`, in their order. Each worker process reads `prefetch` requests ahead."""
    # Lazily: nothing is read before it is needed.
    if not workers:
        batches = map(reader, requests)
        return map(pin, batches) if pin_memory else batches

    # Before the fork.
    check_no_connection(reader.dataset)

    # To the DataLoader a request is a batch of one index, so the order and the size of batches stay ours.
    return start_loader(
        _OneRequestPerItem(reader),
        workers,
        prefetch,
        pin_memory,
        batch_sampler=([request] for request in requests),
        collate_fn=operator.itemgetter(0),
    )


def start_loader(
    dataset: torch.utils.data.Dataset, workers: int, prefetch: int, pin_memory: bool, **options: Any
) -> LoaderBatches:
    """Return batches from a DataLoader, whose worker processes start now. Without workers it reads in this process.

    Each worker reads `prefetch` batches ahead. An error that it sends is raised in place of the batch. `options` are
    further arguments of the DataLoader.
    """
    # torch refuses these options without workers. Open files are listed here, in the rank, before the fork.
    if workers:
        options |= {"prefetch_factor": prefetch, "worker_init_fn": partial(start_worker, open_files())}

    loader = DataLoader(dataset, num_workers=workers, pin_memory=pin_memory and workers > 0, **options)
    return LoaderBatches(loader)


# ---- to the device ----


def pin(batch: Any) -> Any:
    """Return the batch in pinned memory, from which a copy to the GPU does not block the host.

    Tensors on a GPU stay there: only host memory can be pinned.
    """
    from torch.utils.data._utils.pin_memory import pin_memory

    def pin_tensor(tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if tensor.device.type == "cpu" else tensor

    return _map_tensors(batch, pin_tensor, pin_memory, "pin_memory")


def to_device(batch: Any, device: torch.device, move: Callable[[Tensor], Tensor] | None = None) -> Any:
    """Move every tensor inside `batch` to the device, with `move` or else `Tensor.to`, asynchronously if pinned."""
    if device.type == "cpu":
        return batch

    def move_tensor(tensor: Tensor) -> Tensor:
        # A subclass of Tensor may override `to`.
        if move and type(tensor) is Tensor:
            return move(tensor)

        return tensor.to(device, non_blocking=True)

    return _map_tensors(batch, move_tensor, lambda other: other, "to", (device,))


def _map_tensors(
    batch: Any,
    change: Callable[[Tensor], Any],
    otherwise: Callable[[Any], Any],
    method: str,
    arguments: tuple[Any, ...] = (),
) -> Any:
    """Return `batch` with `change` applied to every tensor.

    For an object that is neither a tensor nor a plain container, its own method named `method` is called, if it has
    one. A mapping without that method is treated as a dict. `otherwise` is applied to anything else.
    """
    if isinstance(batch, Tensor):
        return change(batch)

    def map_all(values: Iterable[Any]) -> Iterator[Any]:
        return (_map_tensors(value, change, otherwise, method, arguments) for value in values)

    # The constructor of a named tuple takes its fields as arguments; others take an iterable.
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map_all(batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_all(batch))
    if not isinstance(batch, dict) and hasattr(batch, method):
        return getattr(batch, method)(*arguments)
    if isinstance(batch, Mapping):
        return _mapping_like(batch, dict(zip(batch, map_all(batch.values()), strict=True)))

    return otherwise(batch)


def _mapping_like(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return `values` as a mapping of the same type, with the other attributes of `batch`.

    If the type cannot be built from a dict, return a dict.
    """
    # A shallow copy of these has its own dict, so `update` leaves the original alone.
    if isinstance(batch, dict | UserDict):
        changed = copy.copy(batch)
        changed.update(values)
        return changed

    try:
        return type(batch)(values)  # pyrefly: ignore
    except TypeError:
        return values


# ---- prefetching to the GPU ----


def prefetch_to_device(batches: Iterator[Any], stream: CopyStream) -> Iterator[Any]:
    """Yield batches on the device. The copy of the next batch starts before each batch is yielded.

    An error while reading a batch is raised in place of that batch, not one batch early.
    """
    # At most two copies are in flight: the batch to yield next, and the one after it.
    in_flight: list[Any] = []
    stop: Exception | None = None
    try:
        while stop is None:
            # An error waits until the batches before it have been yielded.
            try:
                in_flight.append(stream.send(next(batches)))
            except Exception as error:  # StopIteration, or an error of the dataset
                stop = error

            if in_flight and (stop or len(in_flight) > 1):
                yield stream.receive(in_flight.pop(0))

        if not isinstance(stop, StopIteration):
            raise stop
    finally:
        # The memory of batches that are dropped must not be reused before their copy has ended.
        for sent in in_flight:
            stream.receive(sent)


class CopyStream:
    """Copies batches to the device on a separate CUDA stream.

    The memory of a batch is allocated on the compute stream, and the batch after next reuses it. Its copy therefore
    waits for all work queued so far, and overlaps with the work on the batch in between.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def send(self, batch: Any) -> tuple[Any, torch.Event]:
        """Queue a copy behind all work queued so far. The host does not wait."""
        # Otherwise the copy could overwrite memory that a kernel of the batch before last still reads.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        moved = to_device(batch, self.device, self._copy)
        return moved, self.stream.record_event()

    def receive(self, sent: tuple[Any, torch.Event]) -> Any:
        """Return the batch, and let the compute stream wait for its copy. The host does not wait."""
        batch, arrived = sent
        torch.cuda.current_stream(self.device).wait_event(arrived)
        return batch

    def _copy(self, tensor: Tensor) -> Tensor:
        # A tensor on a GPU belongs to the compute stream. Reading it on another stream would allow its memory to be
        # reused before the read has ended.
        if tensor.is_cuda:
            return tensor.to(self.device, non_blocking=True)

        # The memory is allocated on the compute stream; the copy runs on ours.
        copied = torch.empty_like(tensor, device=self.device)
        with torch.cuda.stream(self.stream):
            copied.copy_(tensor, non_blocking=True)

        return copied
