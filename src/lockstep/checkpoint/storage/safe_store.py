"""A store that raises only OSErrors, which cost a checkpoint, but not the run.

A store may be the user's, or one of many that fsspec knows, and each has exceptions of its own.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.checkpoint.storage.stores import TensorStore  # which opens stores of this class


class SafeStore:
    """Has the methods of a `TensorStore`, but raises only OSErrors."""

    def __init__(self, store: TensorStore):
        self._store = store

    def write(self, url: str, chunks: Iterable[memoryview]) -> None:
        # The iterator raises the exceptions of the save itself, such as an abort: they pass unchanged.
        raised: list[Exception] = []

        def watched() -> Iterator[memoryview]:
            try:
                yield from chunks
            except Exception as error:
                raised.append(error)
                raise

        with _as_os_error(url, raised):
            self._store.write(url, watched())

    def open(self, url: str) -> io.BufferedIOBase:
        with _as_os_error(url):
            return io.BufferedReader(_SafeReader(self._store.open(url), url))

    def delete(self, url: str) -> None:
        with suppress(FileNotFoundError), _as_os_error(url):
            self._store.delete(url)

    def free_bytes(self, url: str) -> int | None:
        """Return how many bytes can still be written below this URL; None if the store does not say it.

        Its measurement may fail, and an attribute of this name may be something else: neither may cost a save.
        """
        free = None
        with suppress(OSError), _as_os_error(url):
            measure = getattr(self._store, "free_bytes", None)
            free = measure(url) if measure else None

        return free if isinstance(free, int) else None


class _SafeReader(io.RawIOBase):
    """Reads a stream of a store. Any exception of the stream becomes an OSError."""

    def __init__(self, file: Any, url: str):
        super().__init__()
        self._file = file
        self._url = url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _as_os_error(self._url):
            return self._file.readinto(buffer)

    def seek(self, position: int, whence: int = 0) -> int:
        with _as_os_error(self._url):
            return self._file.seek(position, whence)

    def close(self) -> None:
        if not self.closed:
            with _as_os_error(self._url):
                self._file.close()

        super().close()


@contextmanager
def _as_os_error(url: str, passed: Iterable[Exception] = ()) -> Iterator[None]:
    """Turn exceptions into OSError. The exceptions in `passed` stay as they are."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if any(error is other for other in passed):
            raise

        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", url) from error
