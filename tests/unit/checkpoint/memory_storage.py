"""A complete `CheckpointStorage`, as short as one can be: an example for those who write another, and fast in tests."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Iterable


class MemoryStorage:
    """Keeps checkpoints in a dict. Ranks must be threads of one process, and share one object."""

    def __init__(self, name: str = "checkpoints", capacity: int = 1 << 40):
        self.address = f"memory:{name}"
        self.capacity = capacity  # in bytes; tests fill it up

        # The contents of each file by its key. A folder is only a prefix of keys.
        self._files: dict[str, bytes] = {}
        self._owner: str | None = None
        self._lock = threading.Lock()

    def folders(self) -> list[str]:
        with self._lock:
            return list({key.split("/")[0] for key in self._files if "/" in key})

    def open(self, key: str) -> io.BufferedIOBase:
        try:
            return io.BytesIO(self._files[key])
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key) from None

    def write(self, key: str, chunks: Iterable[memoryview]) -> None:
        # `join` copies the chunks, whose memory the saver will reuse.
        self.replace(key, b"".join(chunks))

    def replace(self, key: str, data: bytes) -> None:
        if len(data) > self.free_bytes():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), key)
        with self._lock:
            self._files[key] = bytes(data)

    def rename(self, folder: str, to: str) -> None:
        # With the lock, a reader sees all files either under the old name or under the new one.
        with self._lock:
            moved = [key for key in self._files if key.startswith(f"{folder}/")]
            if not moved:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
            if any(key.startswith(f"{to}/") for key in self._files):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), to)
            for key in moved:
                self._files[to + key.removeprefix(folder)] = self._files.pop(key)

    def delete(self, key: str) -> None:
        # `key` may be a file or a folder.
        with self._lock:
            for file in [file for file in self._files if file == key or file.startswith(f"{key}/")]:
                del self._files[file]

    def claim(self, token: str) -> None:
        self._owner = token

    def owner(self) -> str | None:
        return self._owner

    def free_bytes(self) -> int:
        with self._lock:
            return self.capacity - sum(map(len, self._files.values()))
