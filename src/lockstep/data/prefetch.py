"""Prefetching to a GPU: batches are copied on a stream of their own, one micro-batch ahead, while the GPU computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lockstep.data.loader import to_device


class Link(Protocol):
    """The way of a batch to the device."""

    def send(self, batch: Any) -> Any:
        """Begin to copy, without waiting."""

    def receive(self, sent: Any) -> Any:
        """Return the batch on the device. Later work of the device waits until it is complete; the host does not."""


def one_ahead(batches: Iterator[Any], link: Link) -> Iterator[Any]:
    """Yield batches on the device, each after the next one has been sent.

    A batch that cannot be read raises its error when it is its turn, not one batch early.
    """
    # At most two batches are on their way: the one that is due, and the one after it.
    waiting: list[Any] = []
    problem: Exception | None = None
    try:
        while problem is None:
            try:
                waiting.append(link.send(next(batches)))
            except Exception as error:  # StopIteration is one, too
                problem = error

            if waiting and (problem or len(waiting) > 1):
                yield link.receive(waiting.pop(0))

        if not isinstance(problem, StopIteration):
            raise problem
    finally:
        # Batches that are thrown away: their memory must not be used again before the copy has ended.
        for sent in waiting:
            link.receive(sent)


class _Sent(NamedTuple):
    batch: Any
    arrived: torch.cuda.Event


class SideStream:
    """A link that copies on a CUDA stream of its own.

    Memory is taken from the stream that computes, in the order of the host: a batch that is done with makes room for
    the next but one, however far the host has run ahead. A copy therefore begins when the work is done that was
    queued before its batch was sent, and overlaps with that of the batch in between.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def send(self, batch: Any) -> _Sent:
        """Begin to copy, after the work that the device has been given so far."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        moved = to_device(batch, self.device, self._copy)
        arrived = torch.cuda.Event()
        arrived.record(self.stream)
        return _Sent(moved, arrived)

    def receive(self, sent: _Sent) -> Any:
        """Return the batch, and have the computing stream wait for its copy."""
        torch.cuda.current_stream(self.device).wait_event(sent.arrived)
        return sent.batch

    def _copy(self, tensor: Tensor) -> Tensor:
        # A tensor on a GPU was made by the computing stream: read by another one, its memory might be used again
        # before the read has ended.
        if tensor.is_cuda:
            return tensor.to(self.device, non_blocking=True)

        # Memory comes from the computing stream, the copy runs on ours.
        there = torch.empty_like(tensor, device=self.device)
        with torch.cuda.stream(self.stream):
            there.copy_(tensor, non_blocking=True)
        return there
