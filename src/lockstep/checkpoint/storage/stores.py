"""Where the tensors of checkpoints are kept (`checkpoint.store`): the protocol of a store, and the table of stores.

A store needs three operations, and may have a fourth. It is found by the scheme of a URL: a name in STORES, a class of
the user's (my_module:MyStore://FOLDER), or any scheme that fsspec knows.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, cast

from lockstep.checkpoint.storage.durable import free_bytes, sync_names, write_file
from lockstep.errors import UserError, pip_install
from lockstep.files import open_regular
from lockstep.run_folder.checkpoint_names import file_name, folder_name, is_object_url, object_url
from lockstep.user_classes import import_class, is_class_name


class TensorStore(Protocol):
    """Keeps the tensor files of checkpoints, each at a URL of its own. Each process makes one, without arguments.

    Nothing is ever overwritten or renamed: a URL is written once, and never used again once it is deleted. All ranks
    of a run use a store at the same time, and each rank from two threads. FileNotFoundError means that there is nothing
    at this URL, and errno.ENOSPC that the store is full. Any other exception costs one checkpoint, and never the run.

    A store that knows how many bytes can still be written below a URL may also have a method `free_bytes(url)`. It is
    called before every save; if it raises, or returns no int, the room is unknown, and the save begins.
    """

    def write(self, url: str, chunks: Iterable[memoryview]) -> None:
        """Write the contents of a new URL. They are durable when this returns; until then nothing reads them.

        The memory of the chunks is reused after this returns. The iterator may raise an exception instead of yielding
        the next chunk, if the save is aborted; let it pass.
        """

    def open(self, url: str) -> io.BufferedIOBase:
        """Open a URL as a readable binary stream that can seek."""

    def delete(self, url: str) -> None:
        """Delete the contents of a URL. If there are none, do nothing."""


METHODS = ("write", "open", "delete")


class LocalFiles:
    """Keeps tensors in a folder of a file system that all ranks share: file:///FOLDER."""

    def write(self, url: str, chunks: Iterable[memoryview]) -> None:
        path = _path_of(url)
        write_file(path, chunks)
        sync_names(path)

    def open(self, url: str) -> io.BufferedIOBase:
        return open_regular(_path_of(url))

    def delete(self, url: str) -> None:
        path = _path_of(url)
        path.unlink(missing_ok=True)

        # Delete the folder of the step with its last file. While it has other files, `rmdir` fails.
        with suppress(OSError):
            path.parent.rmdir()

    def free_bytes(self, url: str) -> int:
        return free_bytes(_path_of(url))


def _path_of(url: str) -> Path:
    return Path(url.partition("://")[2])


class FsspecStore:
    """Keeps each file of tensors as one object, such as in S3: any URL whose scheme fsspec knows."""

    def write(self, url: str, chunks: Iterable[memoryview]) -> None:
        file_system, path = _locate(url)
        with suppress(PermissionError):
            file_system.makedirs(file_system._parent(path), exist_ok=True)

        file = file_system.open(path, "wb")
        try:
            for chunk in chunks:
                file.write(chunk)
        except BaseException:
            # The first error is the one to report.
            with suppress(Exception):
                _discard(file)

            raise

        file.close()

    def open(self, url: str) -> io.BufferedIOBase:
        file_system, path = _locate(url)
        # No read-ahead: tensors are read one by one, each in full.
        return cast(io.BufferedIOBase, file_system.open(path, "rb", cache_type="none"))

    def delete(self, url: str) -> None:
        file_system, path = _locate(url)
        file_system.rm_file(path)


def _discard(file: Any) -> None:
    """Close a file of fsspec after an error, without its object if its file system can do that."""
    from fsspec.spec import AbstractBufferedFile

    # The method of the base class does nothing.
    if not isinstance(file, AbstractBufferedFile) or type(file).discard is AbstractBufferedFile.discard:
        # This completes the object, which is deleted with its folder.
        file.close()
        return

    # Nothing may close the file later: that would complete the object when nothing has its URL any more.
    try:
        file.discard()
    finally:
        file.closed = True


def _locate(url: str) -> tuple[Any, str]:
    """Return the file system of fsspec for this URL, and the path in it."""
    import fsspec.core

    return fsspec.core.url_to_fs(url)


# The stores by the scheme of their URLs. `allow_store` adds the user's stores. fsspec knows all other schemes.
STORES: dict[str, TensorStore] = {"file": LocalFiles(), "local": LocalFiles()}
_FSSPEC_STORE = FsspecStore()


def open_store(url: str) -> SafeStore:
    """Return the store of this URL. A user's class must have been allowed."""
    scheme = _scheme_of(url)
    if is_class_name(scheme) and scheme not in STORES:
        why = f"a store that was not allowed: set checkpoint.store={scheme}://FOLDER, or add --store {scheme}"
        raise OSError(errno.EACCES, why, url)  # a run does not wait after this error

    return SafeStore(STORES.get(scheme, _FSSPEC_STORE))


def allow_store(name: str) -> None:
    """Import the user's class MODULE:CLASS, and let URLs use it in this process.

    An import runs code, and a checkpoint may come from elsewhere. So only a name that the user typed is imported, and
    never a name that is in a file of a checkpoint.
    """
    if not is_class_name(name):
        raise UserError(f"{name} is not the name of a store's class", "", "use MODULE:CLASS, such as my_module:MyStore")

    if name not in STORES:
        STORES[name] = import_class(f"the store {name}", name, METHODS)()


def allow_store_of(url: str) -> None:
    """Allow the store of a URL that the user typed."""
    if is_class_name(scheme := _scheme_of(url)):
        allow_store(scheme)


def check_url(url: str) -> None:
    """Raise a UserError if `checkpoint.store` is not a URL, or if no store has its scheme.

    A user's class is imported later, when its module can be found: it may be next to the task.
    """
    scheme, rest = _scheme_of(url), url.partition("://")[2]
    example = "set checkpoint.store=s3://BUCKET/FOLDER, or leave it out: checkpoints are then in run_dir"
    if not rest or not is_object_url(object_url(url, "run", folder_name(0), file_name(0))):
        raise UserError(f"checkpoint.store={url} is not the URL of a store", "", example)

    # The run may be resumed in another working folder.
    if isinstance(STORES.get(scheme), LocalFiles) and not rest.startswith("/"):
        fix = f"set checkpoint.store={scheme}:///FOLDER, which begins at the root"
        raise UserError(f"checkpoint.store={url} is not the full path of a folder", "", fix)

    if scheme not in STORES and not is_class_name(scheme):
        _check_scheme(url, example)


def _check_scheme(url: str, example: str) -> None:
    """Raise a UserError if fsspec does not know the scheme of this URL, or a package for it is missing."""
    import fsspec

    scheme = _scheme_of(url)
    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError:
        raise UserError(f"checkpoint.store={url}: there is no kind of store {scheme}://", "", example) from None
    except ImportError as error:
        fix = f"install the package, such as {pip_install('s3')}, or gcs instead of s3; or {example}"
        raise UserError(f"checkpoint.store={url} needs a package that is not installed", str(error), fix) from None


def _scheme_of(url: str) -> str:
    return url.partition("://")[0]


# ---- a store that raises only OSErrors, which cost a checkpoint, but not the run ----


class SafeStore:
    """Has the methods of a `TensorStore`, but raises only OSErrors.

    A store may be the user's, or one of many that fsspec knows, and each has exceptions of its own.
    """

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
