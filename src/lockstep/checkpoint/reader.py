"""Read the tensors of one checkpoint, however they were sharded when saved."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch

from lockstep.checkpoint.manifest import (
    DTYPES,
    Damaged,
    Forbidden,
    Manifest,
    Missing,
    Piece,
    TensorEntry,
    Unreadable,
    byte_count,
    weight_name,
)
from lockstep.checkpoint.manifest_reader import as_invalid, open_file
from lockstep.checkpoint.rank_file import Header, locate, read_header
from lockstep.checkpoint.storage import retry
from lockstep.checkpoint.storage.durable import CHUNK
from lockstep.checkpoint.storage.folder import Checkpoint
from lockstep.errors import UserError

# How many files a reader keeps open. A rank may need the files of thousands of ranks: more than a process may open.
MAX_OPEN_FILES = 64

Answer = TypeVar("Answer")


class CheckpointReader:
    """Reads full tensors or slices of them from a checkpoint to the CPU, however they were sharded when saved.

    It reads only the bytes that are needed, and does not check digests, which `newest_valid` has done.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        manifest: Manifest,
        beat: Callable[[], None] = lambda: None,
        timeout_s: float | None = None,
    ):
        """`timeout_s`: how long to wait for a file that cannot be read now, before a UserError; None: do not wait.

        `beat` is called after each chunk that is read, and while the reader waits.
        """
        self.checkpoint = checkpoint
        self.manifest = manifest
        self._timeout_s = timeout_s
        self._beat = beat
        self._bytes_read = 0
        self._headers: dict[str, Header] = {}  # by file: each is read only once
        self._kept_open: dict[str, io.BufferedIOBase] | None = None  # by name; None outside of `keeping_open`

    def names(self) -> list[str]:
        """Return the names of all tensors, including every name of a tied tensor."""
        return sorted([*self.manifest.tensors, *self.manifest.aliases])

    def weight_names(self) -> list[str]:
        """Return the names that the model has for its tensors; `weight_name` returns the names in the checkpoint."""
        prefix = weight_name("")
        return [name.removeprefix(prefix) for name in self.names() if name.startswith(prefix)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full tensor."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return _torch_dtype(self._entry(name).dtype)

    def stored_name(self, name: str) -> str:
        """Return the name under which a tensor is stored. Tied weights are stored under the first of their names."""
        return self.manifest.aliases.get(name, name)

    def read(self, name: str) -> torch.Tensor:
        shape = self.shape(name)
        return self.read_slice(name, (0,) * len(shape), shape)

    def read_slice(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Read the slice of `shape` that begins at `offset` in the full tensor.

        Raise InvalidCheckpoint if a file has changed or can no longer be read; with `timeout_s`, wait until it can be
        read, and then raise a UserError.
        """
        name = self.stored_name(name)
        entry = self._entry(name)

        ends = [start + length for start, length in zip(offset, shape, strict=True)]
        bounds = zip(offset, ends, entry.shape, strict=True)
        if not all(0 <= start <= end <= limit for start, end, limit in bounds):
            raise ValueError(f"{name} has shape {entry.shape}; a slice {tuple(shape)} at {tuple(offset)} does not fit")

        # Usually the slice is exactly a piece that some rank wrote, and needs no second copy.
        for piece in entry.pieces:
            if (piece.offset, piece.shape) == (tuple(offset), tuple(shape)):
                return self._rows(name, piece, 0, shape[0] if shape else 1).view(piece.shape)

        # The pieces that the slice overlaps. `low` and `high` are the corners of an overlap.
        overlaps = []
        for piece in entry.pieces:
            piece_ends = [start + length for start, length in zip(piece.offset, piece.shape, strict=True)]
            low = [max(starts) for starts in zip(offset, piece.offset, strict=True)]
            high = [min(both_ends) for both_ends in zip(ends, piece_ends, strict=True)]
            if all(start < end for start, end in zip(low, high, strict=True)):
                overlaps.append((piece, low, high))

        # Check their files before allocating: the shape in a manifest may be larger than the files (see `manifest`).
        for piece, _, _ in overlaps:
            self._locate(name, piece)

        # Of each piece, read only the rows of the overlap, but each row in full.
        result = torch.empty(tuple(shape), dtype=_torch_dtype(entry.dtype))

        for piece, low, high in overlaps:
            rows = self._rows(name, piece, low[0] - piece.offset[0], high[0] - piece.offset[0])
            rows_offset = (low[0], *piece.offset[1:])
            result[_between(low, high, offset)] = rows[_between(low, high, rows_offset)]

        return result

    def _rows(self, name: str, piece: Piece, first: int, last: int) -> torch.Tensor:
        """Read the rows first .. last - 1 of a piece of a tensor, which are contiguous in the file."""
        start = self._locate(name, piece)
        dtype = self.manifest.tensors[name].dtype
        row_bytes = byte_count(piece.shape[1:], dtype)

        # Read into the tensor's own memory.
        data = torch.empty((last - first) * row_bytes, dtype=torch.uint8)
        self._fill(data.numpy().data, piece.file, start + first * row_bytes)
        return data.view(_torch_dtype(dtype)).view(last - first, *piece.shape[1:])

    def _fill(self, memory: memoryview, file: str, start: int) -> None:
        """Fill `memory` with the bytes of a file from `start` on. Raise Damaged if the file has fewer."""
        done = 0

        # After an error it goes on where it was. `readinto` may read less than requested, and 0 bytes at the end. It
        # reads in chunks, because a large tensor takes minutes on a slow disk, which must not look like a hang.
        def read_on() -> None:
            nonlocal done
            with self._open(file) as stream:
                stream.seek(start + done)
                while done < len(memory) and (count := stream.readinto(memory[done : done + CHUNK])):
                    done += count
                    self._bytes_read += count
                    self._beat()

        self._until_readable(read_on)

        # The header was valid, so the file was truncated after it was checked.
        if done < len(memory):
            raise Damaged(self.checkpoint, file, "ends too early")

    @contextmanager
    def keeping_open(self) -> Iterator[None]:
        """Keep files open from one read to the next, until the end of the block.

        In an object store, opening a file takes as long as reading a small tensor.
        """
        self._kept_open = {}
        try:
            yield
        finally:
            self._close_all(self._kept_open)
            self._kept_open = None

    @contextmanager
    def _open(self, file: str) -> Iterator[io.BufferedIOBase]:
        """Open a file, or use it again if it is kept open. Raise InvalidCheckpoint."""
        kept_open = self._kept_open
        if kept_open is None:
            with open_file(self.checkpoint, file) as stream:
                yield stream

            return

        if len(kept_open) == MAX_OPEN_FILES and file not in kept_open:
            self._close_all(kept_open)

        with as_invalid(self.checkpoint, file):
            if file not in kept_open:
                kept_open[file] = self.checkpoint.open(file)

            try:
                yield kept_open[file]
            except OSError:
                # A new stream may work.
                self._close_all({file: kept_open.pop(file)})
                raise

    def _until_readable(self, act: Callable[[], Answer]) -> Answer:
        """Call `act` again while it raises Unreadable or Missing. Give up after `timeout_s` seconds without progress.

        A file that is missing was there when it was verified, on this machine or another. So it is waited for, unless
        the checkpoint is gone.

        Each rank waits on its own, because ranks read different files. `retry_together` is for ranks that act together.
        """
        if self._timeout_s is None:
            return act()

        wait = retry.Wait(self._timeout_s)
        bytes_read = -1

        while True:
            try:
                return act()
            except (Unreadable, Missing) as problem:
                if self._bytes_read != bytes_read:
                    bytes_read = self._bytes_read
                    wait.restart()

                left = wait.seconds_left()
                if isinstance(problem, Missing):
                    if left <= 0 or self._is_deleted():
                        raise
                elif isinstance(problem, Forbidden) or left <= 0:
                    raise unreadable_error(problem) from None

                wait.announce(str(problem))

            wait.pause(left)
            self._beat()

    def _is_deleted(self) -> bool:
        """Return whether the folder of the checkpoint is gone. If it cannot be looked up, it may still be there."""
        try:
            return not self.checkpoint.exists()
        except OSError:
            return False

    def _close_all(self, streams: dict[str, io.BufferedIOBase]) -> None:
        # What was read is complete, even if closing fails.
        for stream in streams.values():
            with suppress(OSError):
                stream.close()

        streams.clear()

    def _locate(self, name: str, piece: Piece) -> int:
        """Return the position of a piece of a tensor in its file. Raise Damaged if the file does not hold it."""
        if piece.file not in self._headers:
            header = self._until_readable(lambda: read_header(self.checkpoint, piece.file))
            self._headers[piece.file] = header

        return locate(self.checkpoint, self._headers[piece.file], name, piece, self.manifest.tensors[name].dtype)

    def _entry(self, name: str) -> TensorEntry:
        """Return the entry of a tensor by any of its names. Raise KeyError if there is none."""
        try:
            return self.manifest.tensors[self.stored_name(name)]
        except KeyError:
            raise KeyError(f"the checkpoint {self.checkpoint.name} has no tensor {name!r}") from None


def unreadable_error(problem: Unreadable, otherwise: str = "") -> UserError:
    """Return the error for a checkpoint that may be intact, but cannot be read. `otherwise`: what else may help."""
    # Waiting may bring back a file server, but no permission.
    if isinstance(problem, Forbidden):
        kind, fix = UserError, f"{retry.READ_FIX}, and try again"
    else:
        kind, fix = retry.StorageUnavailable, retry.fix_or_wait(retry.READ_FIX)

    return kind(f"the checkpoint {problem.checkpoint.path} {problem.predicate}", str(problem), f"{fix}{otherwise}")


def _torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, DTYPES[name].in_torch)


def _between(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of the region between two corners, for a tensor that begins at `origin`."""
    corners = zip(low, high, origin, strict=True)
    return tuple(slice(start - first, end - first) for start, end, first in corners)
