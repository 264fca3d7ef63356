"""What a storage of checkpoints must do (`CheckpointStorage`), and the chunks in which a rank's file is written."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Protocol

# The number of bytes that are written at a time.
CHUNK = 16 << 20

# Direct writes (O_DIRECT) begin and end at multiples of this, in memory and in the file. So do the chunks of a rank's
# file, except its header and the end of its last chunk: `snapshot` aligns the buffer, `format.arrange` pads the header,
# and `split` cuts the data.
PAGE = 4096


class NotDurable(OSError):
    """A rename has happened, but may not survive a power cut."""


class CheckpointStorage(Protocol):
    """A place for checkpoints. Each is written to its own folder (`write`) and committed by one `rename`.

    A key is "FOLDER/FILE", or "FILE" at the top level. A folder exists as long as it has files. Methods raise
    FileNotFoundError if a file or folder is missing, and OSError for all other failures; errno.ENOSPC means "full".
    All ranks of a run use the same storage at the same time, and each rank from two threads. Two objects for the same
    files are equal (`==`).
    """

    @property
    def address(self) -> str:
        """The name of this storage, for messages only."""

    def folders(self) -> list[str]:
        """Return the names of all folders, in any order."""

    def open(self, key: str) -> io.BufferedIOBase:
        """Open a file as a readable binary stream that can seek."""

    def write(self, key: str, chunks: Iterable[memoryview]) -> None:
        """Write a file. It is durable when this returns; until then readers may see an incomplete file.

        The chunks are of any length; those of a rank's data have at most CHUNK bytes, and are aligned to PAGE. Their
        memory is reused after this returns. The iterator may raise an exception instead of yielding the next chunk, if
        the save is aborted; let it pass.
        """

    def replace(self, key: str, data: bytes) -> None:
        """Replace the contents of a small file. Readers see the old contents or the new, never a mixture.

        It need not survive a power cut, after which it may be old, empty or missing.
        """

    def rename(self, folder: str, to: str) -> None:
        """Rename a folder, atomically and durably: this is the commit. `to` must not exist.

        Raise NotDurable if the folder has its new name, but may lose it in a power cut. After any other error the
        folder has its old name.
        """

    def delete(self, key: str) -> None:
        """Delete a file, or a folder with all its files. If it does not exist, do nothing."""

    def claim(self, token: str) -> None:
        """Make the attempt with this token the only one that may commit.

        The owner is checked just before the rename. A process suspended between the check and the rename can still
        commit.
        """

    def owner(self) -> str | None:
        """Return the token of the last claim; None before the first.

        If the token cannot be read, raise OSError: None would mean that no attempt has claimed the storage.
        """

    def free_bytes(self) -> int:
        """Return how many bytes can still be written."""


def split(data: memoryview) -> list[memoryview]:
    """Split `data` for `CheckpointStorage.write`: every chunk but the last is a whole number of pages."""
    # An aborted save ends between two chunks.
    chunks = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]

    # An incomplete page becomes a separate chunk, since a chunk with one cannot be written directly.
    rest = len(data) % PAGE
    if chunks and rest and len(chunks[-1]) > PAGE:
        chunks[-1:] = [chunks[-1][:-rest], chunks[-1][-rest:]]

    return chunks
