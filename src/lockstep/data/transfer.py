"""Moves batches from the host to the device: every batch passes through `Transfer` after collate."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lockstep.data.torch_private import pin_other


class Transfer:
    """Brings batches to the device, through pinned memory if `pin_memory` is set.

    `prefetch` copies batches for a GPU on a separate CUDA stream, one micro-batch ahead, while the GPU computes: those
    of a stream within a step, those of a map-style dataset also across steps.
    """

    def __init__(self, device: torch.device, pin_memory: bool = False):
        """`pin_memory` pins batches that this process has read; the DataLoader pins batches of worker processes."""
        self.device = device
        self._pins = pin_memory and device.type != "cpu"

    def __call__(self, batch: Any) -> Any:
        """Return one batch on the device."""
        return to_device(self._pinned(batch), self.device)

    def prefetch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator over the batches on the device. On a GPU, each copy starts one batch ahead."""
        # On a CPU there is no copy to overlap.
        if self.device.type != "cuda":
            return map(self, batches)

        return prefetch_to_device(map(self._pinned, batches), self._copy_stream)

    @cached_property
    def _copy_stream(self) -> CopyStream:
        return CopyStream(self.device)

    def _pinned(self, batch: Any) -> Any:
        return pin(batch) if self._pins else batch


# ---- one batch ----


def pin(batch: Any) -> Any:
    """Return the batch in pinned memory, from which a copy to the GPU does not block the host.

    Tensors on a GPU stay there: only host memory can be pinned.
    """

    def pin_tensor(tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if tensor.device.type == "cpu" else tensor

    return _map_tensors(batch, pin_tensor, pin_other, "pin_memory")


def to_device(batch: Any, device: torch.device, move: Callable[[Tensor], Tensor] | None = None) -> Any:
    """Move every tensor in `batch` to the device, with `move` or else `Tensor.to`, asynchronously if pinned.

    On a CPU the batch is there already.
    """
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
    one. PackedSequence is such an object, though it is a tuple. A mapping without that method is treated as a dict.
    `otherwise` is applied to anything else.
    """
    if isinstance(batch, Tensor):
        return change(batch)

    def map_all(values: Iterable[Any]) -> Iterator[Any]:
        return (_map_tensors(value, change, otherwise, method, arguments) for value in values)

    # By its class: a field of a named tuple may have the name of the method.
    if isinstance(batch, tuple) and callable(getattr(type(batch), method, None)):
        return getattr(batch, method)(*arguments)

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


# ---- prefetching, on a GPU ----


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
