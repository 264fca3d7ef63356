"""Copy the state to host memory.

Model tensors are copied while training waits; optimizer state is copied during the next forward and backward
(`BackgroundCopy`).

All copies lie in one buffer, which is the data section of the file and only has to be written. Tensors on the CPU must
be copied too, because training changes them while they are written.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from lockstep.checkpoint.format import FileLayout, SliceSpec, arrange
from lockstep.checkpoint.state_tree import DTYPES, dtype_name
from lockstep.checkpoint.storage import PAGE

# (view of the buffer, tensor to copy there), with equal shapes.
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Slice:
    """A slice of the tensor `name` that this rank writes: its shard, or the full tensor."""

    name: str
    tensor: torch.Tensor  # the slice itself; it may be on a GPU and need not be contiguous
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]  # of the slice in the full tensor

    @classmethod
    def full(cls, name: str, tensor: torch.Tensor) -> Slice:
        return cls(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())

    @property
    def spec(self) -> SliceSpec:
        shape = tuple(self.tensor.shape)
        assert len(shape) == len(self.full_shape) == len(self.offset), f"the offset or shape of {self.name} is wrong"
        bounds = zip(self.offset, shape, self.full_shape, strict=True)
        assert all(start + length <= limit for start, length, limit in bounds), f"{self.name} exceeds the full tensor"
        return SliceSpec(self.name, dtype_name(self.tensor, self.name), self.full_shape, self.offset, shape)


class Snapshot:
    """A buffer that is reused from save to save, because allocating takes longer than the copy.

    Call `fit`, then `take`. When `BackgroundCopy.run` returns, `data` is the data section of the file.
    """

    def __init__(self) -> None:
        self.layout: FileLayout = arrange([])
        self._buffer = torch.empty(0, dtype=torch.uint8)

        # Views of the buffer, one for each slice.
        self._views: list[torch.Tensor] = []

    def fit(self, slices: Sequence[Slice]) -> FileLayout:
        """Make room for `slices`. If they have the same layout as the last ones, there is nothing to do."""
        specs = tuple(source.spec for source in slices)
        if specs != self.layout.slices:
            self.layout = arrange(specs)
            self._views = []

        # A GPU can only copy to pinned memory while it computes.
        pinned = any(source.tensor.is_cuda for source in slices)
        if self._buffer.numel() < self.layout.size or (pinned and not self._buffer.is_pinned()):
            self._views = []

            # Free the old buffer before allocating the new one.
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = _allocate(self.layout.size, pinned)

        if not self._views:
            self._views = [
                self._buffer[start : start + spec.bytes].view(DTYPES[spec.dtype]).view(spec.shape)
                for spec, start in zip(specs, self.layout.starts, strict=True)
            ]

        return self.layout

    def take(self, slices: Sequence[Slice], later: Collection[str] = ()) -> BackgroundCopy:
        """Copy `slices`, for which `fit` has made room, except those named in `later`.

        The returned `BackgroundCopy` copies the latter. They must not change before its `wait` returns.
        """
        pairs = list(zip(self._views, slices, strict=True))
        _copy([(view, source.tensor) for view, source in pairs if source.name not in later])
        return BackgroundCopy([(view, source.tensor) for view, source in pairs if source.name in later])

    def data(self) -> memoryview:
        return self._buffer[: self.layout.size].numpy().data


class BackgroundCopy:
    """Copies the rest of a snapshot during the next forward and backward, which do not change these tensors.

    Tensors on a GPU are copied in a separate stream, for which the host does not wait. Tensors on the CPU are copied by
    the thread that writes the file.
    """

    def __init__(self, pairs: Pairs):
        self._pairs = [(view, source.detach()) for view, source in pairs]

        # If a version counter has changed before `wait`, a tensor was changed while it was copied: the copy is torn.
        # `wait` sets `_torn` if it is called before `run` ends; otherwise `run` compares the versions itself.
        self._versions = self._versions_now()
        self._torn: bool | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()

        # One event for each GPU, recorded after its copies.
        devices = {source.device for _, source in self._pairs if source.is_cuda}
        self._on_device = [self._enqueue(device) for device in devices]

    def run(self) -> None:
        """Complete the copy, or raise. Called in the writing thread."""
        try:
            _copy([(view, source) for view, source in self._pairs if not source.is_cuda])
            for event in self._on_device:
                event.synchronize()
        finally:
            # Also after an error, so that the training thread does not wait forever.
            with self._lock:
                torn = self._versions_now() != self._versions if self._torn is None else self._torn
                self._done.set()

        if torn:
            raise RuntimeError(
                "the optimizer's state was changed between two updates, while it was being copied: change it only in "
                "the optimizer's step(), or set checkpoint.asynchronous=false"
            )

    def wait(self) -> None:
        """Wait until the tensors may change. Called in the training thread."""
        with self._lock:
            if self._done.is_set():
                return
            self._torn = self._versions_now() != self._versions

        # The device's current stream waits for the copies; the host does not.
        for event in self._on_device:
            event.wait()

        # The writing thread copies the tensors on the CPU.
        if any(not source.is_cuda for _, source in self._pairs):
            self._done.wait()

    def _versions_now(self) -> list[int]:
        """Return torch's version counter of each tensor, which counts in-place changes."""
        return [source._version for _, source in self._pairs]

    def _enqueue(self, device: torch.device) -> torch.Event:
        # Wait for work that is already queued, since it may still write to the tensors.
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        pairs = [(view, source) for view, source in self._pairs if source.device == device]
        with torch.cuda.stream(stream), torch.no_grad():
            torch._foreach_copy_([view for view, _ in pairs], [source for _, source in pairs], non_blocking=True)
            return stream.record_event()


def _allocate(size: int, pinned: bool) -> torch.Tensor:
    memory = torch.empty(size + PAGE, dtype=torch.uint8, pin_memory=pinned)

    # Touch the pages now, so that the first save need not allocate them.
    memory.fill_(0)

    # Direct writes need memory that is aligned to pages.
    start = -memory.data_ptr() % PAGE
    return memory[start : start + size]


def _copy(pairs: Pairs) -> None:
    """Copy and wait until the copies are complete."""
    if not pairs:
        return

    with torch.no_grad():
        torch._foreach_copy_([view for view, _ in pairs], [source.detach() for _, source in pairs], non_blocking=True)

    # Host-device synchronisation: after it, training may change the tensors.
    for device in {source.device for _, source in pairs if source.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
