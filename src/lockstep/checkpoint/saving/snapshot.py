"""Copy the state to host memory, so that training can continue while it is written.

`SnapshotBuffer` has the memory, and `Snapshot` is one copy in it. Model tensors are copied while training waits;
optimizer state and averages are copied during the next forward and backward.

The buffer is written as it is: it is the data section of the file. Tensors on the CPU are copied too, because training
may change them before they are written.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

import torch

from lockstep.checkpoint.manifest import DTYPES, Piece, TensorEntry
from lockstep.checkpoint.rank_file import FileLayout, arrange
from lockstep.checkpoint.storage.durable import PAGE
from lockstep.errors import UserError
from lockstep.runtime.shards import LocalShard

# torch's dtype -> its name in a file.
_DTYPE_NAMES = {getattr(torch, dtype.in_torch): name for name, dtype in DTYPES.items()}

# (view of the buffer, tensor to copy there), with equal shapes.
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class SnapshotBuffer:
    """Host memory for one snapshot after another. It is reused, because allocating takes longer than the copy.

    Call `reserve`, then `take`.
    """

    def __init__(self, file: str):
        self._file = file  # the name of the file that will hold the data
        self.layout: FileLayout = arrange({})
        self._memory = torch.empty(0, dtype=torch.uint8)

        # Views of the buffer, one for each shard.
        self._views: dict[str, torch.Tensor] = {}

    def reserve(self, shards: Mapping[str, LocalShard]) -> FileLayout:
        """Make room for `shards`. If they have the same layout as the last ones, there is nothing to do."""
        tensors = {name: _entry(name, shard, self._file) for name, shard in shards.items()}
        if tensors != self.layout.tensors:
            self.layout = arrange(tensors)
            self._views = {}

        # A GPU can only copy to pinned memory while it computes.
        pinned = any(shard.local.is_cuda for shard in shards.values())
        if self._memory.numel() < self.layout.size or (pinned and not self._memory.is_pinned()):
            self._views = {}

            # Free the old memory before allocating the new one.
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = _allocate(self.layout.size, pinned)

        if not self._views:
            for name, shard in shards.items():
                data = self._memory[self.layout.byte_ranges[name]]
                self._views[name] = data.view(shard.local.dtype).view(shard.local.shape)

        return self.layout

    def take(self, shards: Mapping[str, LocalShard], copy_later: Collection[str] = ()) -> Snapshot:
        """Copy `shards`, for which `reserve` has made room, except the tensors named in `copy_later`.

        These are copied later, and must not change before `Snapshot.wait` returns.
        """
        now: Pairs = []
        later: Pairs = []
        for name, shard in shards.items():
            pairs = later if name in copy_later else now
            pairs.append((self._views[name], shard.local))

        _copy(now)
        data = self._memory[: self.layout.size].numpy().data
        return Snapshot(self.layout, data, later)


class Snapshot:
    """A copy of this rank's shards, which one save writes, and which training does not change.

    The tensors that were left for later are copied during the next forward and backward, which do not change them: from
    a GPU in a separate stream, for which the host does not wait, and on the CPU by the thread that writes the file.
    """

    def __init__(self, layout: FileLayout, data: memoryview, later: Pairs):
        self.layout = layout  # of the file
        self.data = data  # the data section of the file; whole once `complete` has returned
        self._pairs = [(view, source.detach()) for view, source in later]

        # The version counters of the tensors show whether training has changed one of them during the copy.
        self._versions = self._versions_now()
        self._torn: bool | None = None  # None: not compared yet (`_compare_once`)
        self._lock = threading.Lock()
        self._done = threading.Event()

        # One event for each GPU, recorded after its copies.
        devices = {source.device for _, source in self._pairs if source.is_cuda}
        self._gpu_copies = [self._enqueue(device) for device in devices]

    def complete(self) -> None:
        """Copy what is left, or raise. The writing thread calls this."""
        try:
            _copy([(view, source) for view, source in self._pairs if not source.is_cuda])

            for event in self._gpu_copies:
                event.synchronize()
        finally:
            # Do this after an error, too, so that the training thread does not wait forever.
            torn = self._compare_once()
            self._done.set()

        if torn:
            raise RuntimeError(
                "the optimizer's state was changed between two updates, while it was being copied: change it only in "
                "the optimizer's step(), or set checkpoint.asynchronous=false"
            )

    def wait(self) -> None:
        """Wait until the tensors may change. The training thread calls this."""
        if self._done.is_set():
            return

        self._compare_once()

        # The device's current stream waits for the copies; the host does not.
        for event in self._gpu_copies:
            event.wait()

        # The writing thread copies the tensors on the CPU.
        if any(not source.is_cuda for _, source in self._pairs):
            self._done.wait()

    def _compare_once(self) -> bool:
        """Return whether a tensor was changed during the copy. Only the first of two calls compares.

        `wait` is first if an update comes before the end of the copy; after it the tensors may change. Otherwise
        `complete` is first, at the end of the copy.
        """
        with self._lock:
            if self._torn is None:
                self._torn = self._versions_now() != self._versions

            return self._torn

    def _versions_now(self) -> list[int]:
        """Return torch's version counter of each tensor, which counts in-place changes."""
        return [source._version for _, source in self._pairs]

    def _enqueue(self, device: torch.device) -> torch.Event:
        """Queue the copies from one GPU in a stream of their own. Return an event that comes after the last of them."""
        # Wait for work that is already queued, since it may still write to the tensors.
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))

        pairs = [(view, source) for view, source in self._pairs if source.device == device]
        with torch.cuda.stream(stream), torch.no_grad():
            torch._foreach_copy_([view for view, _ in pairs], [source for _, source in pairs], non_blocking=True)
            return stream.record_event()


def _entry(name: str, shard: LocalShard, file: str) -> TensorEntry:
    """Describe a tensor of which `file` will hold this shard."""
    shape = tuple(shard.local.shape)
    bounds = zip(shard.offset, shape, shard.full_shape, strict=True)
    assert all(start + length <= limit for start, length, limit in bounds), f"{name} exceeds the full tensor"
    return TensorEntry(_dtype_name(name, shard.local), shard.full_shape, (Piece(file, shard.offset, shape),))


def _dtype_name(name: str, tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype in a file, or raise if checkpoints cannot hold the tensor."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.dtype not in _DTYPE_NAMES:
        raise UserError(
            f"the tensor {name!r} cannot be saved in a checkpoint",
            f"{tensor.dtype}, {tensor.layout}, on {tensor.device}",
            "keep it as a dense tensor of bool, integers or floats (a complex one with torch.view_as_real)",
        )

    return _DTYPE_NAMES[tensor.dtype]


def _allocate(size: int, pinned: bool) -> torch.Tensor:
    """Return `size` bytes of host memory that begin at a page."""
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

    # Host-device synchronization: after it, training may change the tensors.
    for device in {source.device for _, source in pairs if source.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
