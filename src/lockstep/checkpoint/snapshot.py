"""A copy of the state in host memory, made while training waits: the only part of a save that costs time.

The copy lies in one buffer that already is the data section of the file, so that nothing is left to do but write it.
CPU tensors are copied too: training goes on changing them while they are written.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from lockstep.checkpoint import dtypes
from lockstep.checkpoint.durable import PAGE
from lockstep.checkpoint.format import Block, Layout, arrange


@dataclass(frozen=True)
class Slice:
    """This rank's block of a tensor called `name`: it lies at `offset` in a whole of `shape`."""

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> Slice:
        return cls(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())

    def block(self) -> Block:
        here = tuple(self.tensor.shape)
        dtype = dtypes.name_of(self.tensor, self.name)
        assert len(here) == len(self.shape) == len(self.offset), f"{self.name} has another number of dimensions"
        ends = [start + length for start, length in zip(self.offset, here, strict=True)]
        assert all(end <= limit for end, limit in zip(ends, self.shape, strict=True)), f"{self.name} reaches too far"
        return Block(self.name, dtype, tuple(self.shape), tuple(self.offset), here)


class Snapshot:
    """The buffer, kept from save to save: fresh memory would cost more than the copy."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.layout: Layout = arrange([])
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._views: list[torch.Tensor] = []

    def fit(self, slices: Sequence[Slice]) -> Layout:
        """Make room for `slices`. Costs nothing if they are laid out like the last ones."""
        blocks = [piece.block() for piece in slices]
        pinned = any(piece.tensor.is_cuda for piece in slices)
        if blocks != self.blocks:
            self.blocks, self.layout, self._views = blocks, arrange(blocks), []
        if self._buffer.numel() < self.layout.size or (pinned and not self._buffer.is_pinned()):
            self._views = []
            self._buffer = torch.empty(0, dtype=torch.uint8)  # let go of the old one before asking for more
            room = torch.empty(self.layout.size + PAGE, dtype=torch.uint8, pin_memory=pinned)
            room.fill_(0)  # touch the pages now: the first save would pay for it
            start = -room.data_ptr() % PAGE
            self._buffer = room[start : start + self.layout.size]
        if not self._views:
            self._views = [self._view(number) for number in range(len(blocks))]
        return self.layout

    def take(self, slices: Sequence[Slice], steady: Collection[str] = ()) -> Copying:
        """Copy `slices`, for which `fit` has made room: now, but for `steady` ones, which nobody changes before
        `Copying.wait` has returned."""
        order = [slices[index] for index in self.layout.order]
        pairs = list(zip(self._views, order, strict=True))
        _copy([(view, piece.tensor) for view, piece in pairs if piece.name not in steady])
        return Copying([(view, piece.tensor) for view, piece in pairs if piece.name in steady])

    def data(self) -> memoryview:
        return self._buffer[: self.layout.size].numpy().data

    def release(self) -> None:
        self.__init__()

    def _view(self, number: int) -> torch.Tensor:
        block, start = self.blocks[self.layout.order[number]], self.layout.starts[number]
        place = self._buffer[start : start + block.bytes]
        return place.view(dtypes.TYPES[block.dtype]).view(block.shape)


Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # (place in the buffer, what is to be copied there)


class Copying:
    """The part of a snapshot that is made while the next step computes: only an update changes these tensors.

    What lies on a GPU is copied in a stream of its own, so that not even the host waits; the rest by the thread that
    will write the file.
    """

    def __init__(self, pairs: Pairs):
        self._pairs = [(view, source.detach()) for view, source in pairs]
        self._versions = self._versions_now()
        self._lock, self._done = threading.Lock(), threading.Event()
        self._released = self._torn = False  # the tensors may change; they have changed before that
        self._on_device: list[torch.cuda.Event] = []
        for device in {source.device for _, source in self._pairs if source.is_cuda}:
            self._on_device.append(self._enqueue(device))
        if not self._pairs:
            self._done.set()

    def run(self) -> None:
        """In the writing thread: make the copy complete, or raise."""
        try:
            _copy([(view, source) for view, source in self._pairs if not source.is_cuda])
            for event in self._on_device:
                event.synchronize()
        finally:
            with self._lock:
                torn = self._torn or (not self._released and self._versions_now() != self._versions)
                self._done.set()
        if torn:
            raise RuntimeError(
                "the optimizer's state was changed between two updates, while it was being copied: let only its own "
                "step change it, or set checkpoint.asynchronous=false"
            )

    def wait(self) -> None:
        """In the training thread: from now on these tensors may change."""
        with self._lock:
            if self._done.is_set():
                return
            self._torn, self._released = self._versions_now() != self._versions, True
        for event in self._on_device:
            event.wait()  # the device's own stream waits, the host does not
        if any(not source.is_cuda for _, source in self._pairs):
            self._done.wait()

    def _versions_now(self) -> list[int]:
        """torch counts the changes of a tensor."""
        return [source._version for _, source in self._pairs]

    def _enqueue(self, device: torch.device) -> torch.cuda.Event:
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side), torch.no_grad():
            pairs = [(view, source) for view, source in self._pairs if source.device == device]
            torch._foreach_copy_([view for view, _ in pairs], [source for _, source in pairs], non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return event


def _copy(pairs: Pairs) -> None:
    if not pairs:
        return
    with torch.no_grad():
        torch._foreach_copy_([view for view, _ in pairs], [source.detach() for _, source in pairs], non_blocking=True)
    for device in {source.device for _, source in pairs if source.is_cuda}:
        torch.cuda.current_stream(device).synchronize()  # the host waits: the copies must be complete
