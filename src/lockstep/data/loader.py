"""Reading samples, in this process or in worker processes, and moving batches to the device.

Random numbers are keyed by sample, so that a sample looks the same on every rank and in every worker. Batches for a GPU
are copied on a separate stream, one micro-batch ahead, while the GPU computes.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import multiprocessing
import operator
import os
import signal
import socket
import stat
import threading
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from lockstep.data.sample_errors import batch_to_send, explain_collate, is_empty, name_samples, unless_refused
from lockstep.errors import UserError
from lockstep.runtime.parent_death import die_with_parent, signal_on_parents_death
from lockstep.runtime.seeds import derive, seed_everything
from lockstep.task import Task

# (epoch, sample ids) of one micro-batch
Request = tuple[int, Sequence[int]]

# After SIGTERM a loader process ends by itself, unless its rank ends it before.
LOADER_GRACE_S = 120.0

NESTED = 8  # datasets within each other that are looked at

DESCRIPTORS = "/proc/self/fd"  # of Linux: opening an entry opens its file once more


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
            rows = torch.from_numpy(np.asarray(request[1]))
            try:
                return [tensor[rows] for tensor in self.dataset.tensors]
            except IndexError as error:  # a sampler of the user's own gave an id that the dataset does not have
                name_samples(error, rows.tolist(), f"in epoch {request[0]}")
                raise
        epoch, ids = request
        where = f"in epoch {epoch}"
        return collate_named(self.collate, self.samples(request), [int(i) for i in ids], where, self._plain)

    def samples(self, request: Request) -> list[Any]:
        """Return the samples of a request, not collated."""
        epoch, ids = request
        where = f"in epoch {epoch}"
        numbers = [int(i) for i in ids]
        if self._reads_in_batches:
            # One seed for all: the samples of a micro-batch are drawn together.
            self._seed(epoch, numbers[0])
            return self._read(self.dataset.__getitems__, numbers, numbers, where)

        # Each sample has its own seed, so that it does not depend on those read before it.
        samples = []
        for index in numbers:
            self._seed(epoch, index)
            samples.append(self._read(partial(operator.getitem, self.dataset), index, [index], where))
        return samples

    def read_again(self, request: Request) -> Any:
        """Read a micro-batch twice: state that reading or collating changes is another one by then."""
        if not self._gathers:
            self(request)
        return self(request)

    def some_batch(self, size: int) -> Any:
        """Return a batch that is not empty, to compute with where a collate has left nothing."""
        for start in range(0, len(self.dataset), size):
            batch = self((0, range(start, min(start + size, len(self.dataset)))))
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
        # Of what a process sends, the first is like the rest.
        first = self.sent == 0
        self.sent += 1
        ids = [int(i) for i in index[1]]
        return batch_to_send(lambda: self.reader(index), ids, f"in epoch {index[0]}", check=first)


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
    return map(unless_refused, loader)


def plain_attributes(dataset: Any) -> dict[str, Any]:
    """Return what a loader process has a copy of: numbers, texts, lists and arrays that the dataset holds by name."""
    plain = (int, float, str, list, tuple, np.ndarray, Tensor)
    return {name: value for name, value in _attributes(dataset) if isinstance(value, plain)}


def check_no_connection(dataset: Any) -> None:
    """Refuse a connection in the dataset: forked processes would all use it, and get each other's answers."""
    for name, value in _attributes(dataset):
        if isinstance(value, socket.socket | Connection):
            raise UserError(
                f"the dataset's {name} is an open connection, which loader processes would share",
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


def start_worker(files: dict[int, int], worker: int) -> None:
    """Prepare a loader process, which was forked when `files` (see `open_files`) were open."""
    _die_with_rank()
    outlive_signals()
    reopen(files)


def _die_with_rank() -> None:
    """End with the rank, even in the middle of a sample: if its launcher is killed too, nobody else would see to it."""
    rank = multiprocessing.parent_process()
    # A fork server, of which this process may be a child, ends with the rank as well.
    if rank is not None and rank.pid is not None and multiprocessing.get_start_method() == "fork":
        die_with_parent(rank.pid)
    else:
        signal_on_parents_death(signal.SIGKILL)


def open_files() -> dict[int, int]:
    """Return the descriptors of the files that this process may read from, and where it is in each."""
    offsets: dict[int, int] = {}
    folder = Path(DESCRIPTORS)
    for descriptor in [int(entry.name) for entry in folder.iterdir()] if folder.is_dir() else []:
        # The listing's own descriptor is closed by now.
        with contextlib.suppress(OSError):
            readable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
            if readable and stat.S_ISREG(os.fstat(descriptor).st_mode):
                offsets[descriptor] = os.lseek(descriptor, 0, os.SEEK_CUR)
    return offsets


def reopen(files: dict[int, int]) -> None:
    """Give this process its own position in each file: forked processes share one, and would move it under each other.

    The descriptors keep their numbers, so file objects and libraries that hold them need not know.
    """
    for descriptor, offset in files.items():
        # A file that may not be opened again stays shared; the first micro-batch is compared with the rank's own.
        with contextlib.suppress(OSError):
            # A temporary file also has flags that would make another one, or follow no link to it.
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND)
            own = os.open(f"{DESCRIPTORS}/{descriptor}", flags)
            os.lseek(own, offset, os.SEEK_SET)
            os.dup2(own, descriptor, inheritable=False)
            os.close(own)


def outlive_signals() -> None:
    """Make a loader process survive the signals of a preemption.

    Schedulers signal all processes of a job, but a rank needs its loaders until it has saved. They end with the
    rank, or LOADER_GRACE_S after a SIGTERM.
    """
    # Ctrl-C reaches the whole process group, SIGUSR1 is Slurm's warning.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_later)


def _exit_later(number: int, frame: Any) -> None:
    timer = threading.Timer(LOADER_GRACE_S, os._exit, (0,))
    timer.daemon = True
    timer.start()


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


def one_ahead(batches: Iterator[Any], link: SideStream) -> Iterator[Any]:
    """Yield batches on the device, each after `link` sent the next one.

    A batch that cannot be read raises its error in its turn, not one batch early.
    """
    # At most two batches are on their way: the one that is due, and the one after it.
    waiting: list[Any] = []
    problem: Exception | None = None
    try:
        while problem is None:
            try:
                waiting.append(link.send(next(batches)))
            except Exception as error:  # or StopIteration
                problem = error

            if waiting and (problem or len(waiting) > 1):
                yield link.receive(waiting.pop(0))

        if not isinstance(problem, StopIteration):
            raise problem
    finally:
        # Batches that are dropped: their memory must not be reused before the copy has ended.
        for sent in waiting:
            link.receive(sent)


class SideStream:
    """Copies batches to the device on a separate CUDA stream.

    Its memory belongs to the stream that computes: a batch that is no longer needed makes room for the next but one,
    however far the host has run ahead. A copy therefore begins when the work that was queued before it is done, and
    overlaps with the work of the batch in between.
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
