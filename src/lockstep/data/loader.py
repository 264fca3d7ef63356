"""Reads samples and collates them, in this process or in worker processes.

Random numbers are seeded per sample, so that a sample is the same on every rank and in every worker. (A dataset with
`__getitems__` is seeded once per micro-batch, by its first id.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
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


class BatchRequest(NamedTuple):
    """Which samples to read for one micro-batch."""

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
        collates_by_default = is_default_collate(self.collate)
        if collates_by_default:
            self.collate = default_collate  # Task.collate would only call it

        # A Subset always has `__getitems__`, so the dataset inside it decides.
        self.innermost = self.dataset
        while isinstance(self.innermost, Subset):
            self.innermost = self.innermost.dataset

        self._reads_in_batches = hasattr(self.innermost, "__getitems__")

        # A TensorDataset only indexes its tensors, so a batch takes one index operation per tensor.
        self._indexes_tensors = type(self.dataset) is TensorDataset and collates_by_default

    def __call__(self, request: BatchRequest) -> Any:
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
        return collate_samples(self.collate, self.read_samples(request), ids, request.where)

    def read_samples(self, request: BatchRequest) -> list[Any]:
        """Return the samples of a request before collate."""
        ids = [int(i) for i in request.ids]
        if self._reads_in_batches:
            # One call reads all samples, so they share one seed.
            self._seed(request.epoch, ids[0])
            return self._read(self.dataset.__getitems__, ids, ids, request)

        # Each sample has its own seed, so that it does not depend on the samples read before it.
        samples = []
        for index in ids:
            self._seed(request.epoch, index)
            samples.append(self._read(partial(operator.getitem, self.dataset), index, [index], request))

        return samples

    def read_again(self, request: BatchRequest) -> Any:
        """Read the batch twice and return the second. If the dataset or collate keeps state, the two differ."""
        if not self._indexes_tensors:
            self(request)
        return self(request)

    def nonempty_batch(self, size: int) -> Any:
        """Return the first batch of `size` samples that collate does not empty, to run in place of an empty one."""
        for start in range(0, len(self.dataset), size):
            batch = self(BatchRequest(0, range(start, min(start + size, len(self.dataset)))))
            if not is_empty(batch):
                return batch

        raise UserError(
            f"collate drops all samples of every batch of {size}",
            "it returned None, or tensors of length 0, for the whole dataset",
            "return a batch from Task.collate for at least some samples",
        )

    def _read(self, read: Callable[[Any], Any], key: Any, ids: list[int], request: BatchRequest) -> Any:
        """Call a function of the dataset; an error gets the ids of the samples."""
        try:
            return read(key)
        except StopIteration as error:  # it would silently end the generators that yield the batches
            name_samples(error, ids, request.where)
            raise RuntimeError("the dataset raised StopIteration") from error
        except Exception as error:  # the dataset is the user's code
            name_samples(error, ids, request.where)
            raise

    def _seed(self, epoch: int, index: int) -> None:
        if self.seed_samples:
            seed_everything(derive(self.seed, "sample", epoch, index))


def _gather(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return `tensor[rows]`; `rows` has shape (samples,)."""
    # A dataset may keep its tensors on a GPU.
    rows = rows.to(tensor.device)

    # `index_select` is faster, but its result is always contiguous: it would lose channels_last.
    return tensor.index_select(0, rows) if tensor.is_contiguous() else tensor[rows]


def is_default_collate(collate: Callable[[list[Any]], Any]) -> bool:
    """Return whether this is torch's default_collate, or Task.collate, which calls it."""
    return getattr(collate, "__func__", collate) in (Task.collate, default_collate)


def collate_samples(collate: Callable[[list[Any]], Any], samples: list[Any], ids: list[int], where: str) -> Any:
    """Return `collate(samples)`. An error gets the ids of the samples."""
    try:
        return collate(samples)
    except UserError:
        raise
    except StopIteration as error:  # see `SampleReader._read`
        name_samples(error, ids, where)
        raise RuntimeError("collate raised StopIteration") from error
    except Exception as error:  # collate is the user's code
        explained = explain_collate_error(error, samples, ids, where, is_default_collate(collate))
        if explained is error:
            raise

        raise explained from error


def is_empty(batch: Any) -> bool:
    """Return whether collate dropped all samples: the batch is None, or all its tensors have length 0."""
    # A tensor of shape () has no length, and a nested tensor no `shape`.
    lengths = [tensor.size(0) for tensor in _tensors(batch) if tensor.dim()]
    return batch is None or (bool(lengths) and not any(lengths))


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

    def __getitem__(self, index: BatchRequest) -> Any:
        # Check only the first batch of each worker, because pickling takes time: later batches have the same structure.
        is_first = self.sent == 0
        self.sent += 1
        ids = [int(i) for i in index.ids]
        return batch_to_send(lambda: self.reader(index), ids, index.where, check=is_first)


def read_all(
    reader: SampleReader, requests: Iterator[BatchRequest], workers: int, prefetch: int, pin_memory: bool = False
) -> Iterator[Any]:
    """Return batches for `requests`, in their order. Each worker process prefetches `prefetch` requests.

    `pin_memory`: of batches that worker processes have read; `Transfer` pins those of this process.
    """
    # Lazily: nothing is read before it is needed.
    if not workers:
        return map(reader, requests)

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

    Each worker prefetches `prefetch` batches. An error that it sends is raised in place of the batch. `options` are
    further arguments of the DataLoader.
    """
    # torch refuses these options without workers. Open files are listed here, in the rank, before the fork.
    if workers:
        options |= {"prefetch_factor": prefetch, "worker_init_fn": partial(start_worker, open_files())}

    loader = DataLoader(dataset, num_workers=workers, pin_memory=pin_memory and workers > 0, **options)
    return LoaderBatches(loader)


def already_collated(batch: Any) -> Any:
    """Return the batch of a stream as it is. This is the `collate_fn` of its loader."""
    return batch
