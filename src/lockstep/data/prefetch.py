"""Batches on their way to a GPU while it computes: copied on a stream of their own, one micro-batch ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lockstep.data.loader import to_device


class Link(Protocol):
    def send(self, batch: Any) -> Any:
        """Begin to copy. Nobody waits."""

    def receive(self, sent: Any) -> Any:
        """The batch on the device, where what comes next waits until it is complete. The host does not."""


def one_ahead(batches: Iterator[Any], link: Link) -> Iterator[Any]:
    """What was read last is sent before the one before it is handed out. A batch that cannot be read is told about
    when it is its turn."""
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
        for sent in waiting:  # thrown away: its memory must not be used again before the copy has ended
            link.receive(sent)


class _Sent(NamedTuple):
    batch: Any
    arrived: torch.cuda.Event


class SideStream:
    """Memory is taken from the stream that computes, in the order of the host: a batch that is done with makes room for
    the next but one, however far the host has run ahead. So a copy begins when the work is done that was handed out
    before its batch was sent: it runs beside that of the batch in between."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)

    def send(self, batch: Any) -> _Sent:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        moved = to_device(batch, self.device, self._copy)
        arrived = torch.cuda.Event()
        arrived.record(self.stream)
        return _Sent(moved, arrived)

    def receive(self, sent: _Sent) -> Any:
        torch.cuda.current_stream(self.device).wait_event(sent.arrived)
        return sent.batch

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.is_cuda:  # beside the stream that made it, its memory might be used again while it is being read
            return tensor.to(self.device, non_blocking=True)
        there = torch.empty_like(tensor, device=self.device)
        with torch.cuda.stream(self.stream):
            there.copy_(tensor, non_blocking=True)
        return there
