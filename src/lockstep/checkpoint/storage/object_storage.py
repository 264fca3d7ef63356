"""Checkpoints whose large files are in an object store, such as S3, through fsspec.

An object store cannot rename, and cannot change several objects at once. So it holds only the contents of the ranks'
files. Everything else is in the run's folder, and is committed by the same rename as in `file_system`:

    RUN/checkpoints/step-00000040/manifest.json                   a file, like `latest` and `owner`
    RUN/checkpoints/step-00000040/rank-00000.safetensors.object   a small file with the address of an object
    s3://BUCKET/RUN/step-00000040/rank-00000-RANDOM.safetensors   the object

An object is written once, at an address that is never used again. The address is in the folder before the object
exists, so what a killed process leaves behind is found there, and deleted with the folder.
"""

from __future__ import annotations

import errno
import io
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lockstep.checkpoint.storage.file_system import FileSystemStorage, sync_folder, write_file
from lockstep.errors import UserError
from lockstep.launch.folder.checkpoint_names import OBJECTS
from lockstep.launch.records import read_bytes, replacing

# The end of the name of a file that holds the address of an object.
_ADDRESS = ".object"

# The beginning of that name, once the object is to be deleted.
_DELETED = "deleted-"

# Files with this ending are kept as objects. All others are small.
_LARGE = ".safetensors"

# The addresses that `_new_address` makes. A folder may come from elsewhere: no other address is opened or
# deleted.
_VALID = re.compile(r"[a-z0-9+]+://[^\s:*?]+/step-\d{8,18}/rank-\d{5,}-[0-9a-f]{16}\.safetensors")


class ObjectStorage(FileSystemStorage):
    """Keeps the contents of large files below `url`, and everything else in a folder.

    Without `url` it writes files only, but it can still read and delete the objects that were written before.
    """

    def __init__(self, root: Path, url: str | None = None):
        super().__init__(root)
        self.url = url and url.rstrip("/")

    def open(self, key: str) -> io.BufferedIOBase:
        address = _read_address(self.root / f"{key}{_ADDRESS}")
        if address is None:
            return super().open(key)

        with _as_os_error(address):
            file_system, path = _locate(address)
            # No read-ahead: tensors are read one by one, each in full.
            file = file_system.open(path, "rb", cache_type="none")
            return io.BufferedReader(_ObjectReader(file, address))

    def write(self, key: str, chunks: Iterable[memoryview]) -> None:
        if self.url is None or not key.endswith(_LARGE):
            super().write(key, chunks)
            return

        # The address must be whole and durable before the object exists.
        address = self._new_address(key)
        address_file = self.root / f"{key}{_ADDRESS}"
        _replace_durably(address_file, address)

        with _create_object(address) as file:
            for chunk in chunks:
                with _as_os_error(address):
                    file.write(chunk)

        # Another rank, or another attempt, may have deleted the folder before the object existed. No other process
        # has the address now.
        if _read_address(address_file) != address:
            _delete_object(address)
            raise FileNotFoundError(errno.ENOENT, "deleted while its object was written", str(address_file))

    def delete(self, key: str) -> None:
        path = self.root / key
        if path.is_dir():
            addresses = list(path.glob(f"*{_ADDRESS}"))
        else:
            file = self.root / f"{key}{_ADDRESS}"
            addresses = [file, _to_delete(file)]

        for file in addresses:
            _delete_with_object(file)

        super().delete(key)

    def claim(self, token: str) -> None:
        super().claim(token)

        # Without the setting, `open_storage` knows by this file that checkpoints have objects. So it must survive a
        # power cut: without it, the objects would be lost to a resume, to `lockstep ckpt` and to `lockstep rm`.
        if self.url is not None:
            _replace_durably(self.root / OBJECTS, f"{self.url}\n")

    def free_bytes(self) -> int:
        # No object store says how much it can take.
        return super().free_bytes() if self.url is None else 1 << 60

    def _new_address(self, key: str) -> str:
        """Return an address that was never used, with names in it that people recognize."""
        folder, _, file = key.rpartition("/")
        run = re.sub(r"[^\w.-]", "_", self.root.absolute().parent.name)
        step = folder.partition(".")[0]
        return f"{self.url}/{run}/{step}/{file.removesuffix(_LARGE)}-{secrets.token_hex(8)}{_LARGE}"


def check_url(url: str) -> None:
    """Raise a UserError if fsspec does not know this kind of address, or a package for it is missing."""
    kind, _, rest = url.partition("://")
    example = "set checkpoint.storage=s3://BUCKET/FOLDER, or leave it out: checkpoints are then in run_dir"
    if not rest or not _VALID.fullmatch(f"{url}/run/step-00000000/rank-00000-{'0' * 16}{_LARGE}"):
        raise UserError(f"checkpoint.storage={url} is not the address of an object store", "", example)

    # The run may be resumed in another working folder.
    if kind in ("file", "local") and not rest.startswith("/"):
        fix = f"set checkpoint.storage={kind}:///FOLDER, which begins at the root"
        raise UserError(f"checkpoint.storage={url} is not the full path of a folder", "", fix)

    import fsspec

    try:
        fsspec.get_filesystem_class(kind)
    except ValueError:
        raise UserError(f"checkpoint.storage={url}: there is no kind of store {kind}://", "", example) from None
    except ImportError as error:
        fix = f"pip install the package, such as 'lockstep-train[s3]' or 'lockstep-train[gcs]'; or {example}"
        raise UserError(f"checkpoint.storage={url} needs a package that is not installed", str(error), fix) from None


# ---- objects ----


def _replace_durably(file: Path, text: str) -> None:
    """Replace the contents of a small file. The contents and the name are durable when this returns."""
    with replacing(file, str(os.getpid())) as temporary:
        write_file(temporary, [memoryview(text.encode())])

    sync_folder(file.parent)


def _read_address(file: Path) -> str | None:
    """Return the address in a file; None if there is no such file."""
    try:
        address = read_bytes(file, most=10_000).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None

    if not _VALID.fullmatch(address):
        raise OSError(errno.EINVAL, "not the address of an object of a checkpoint", str(file))

    return address


def _locate(address: str) -> tuple[Any, str]:
    """Return the file system of fsspec for this address, and the path in it."""
    import fsspec.core

    return fsspec.core.url_to_fs(address)


@contextmanager
def _create_object(address: str) -> Iterator[Any]:
    """Open an object for writing. It is durable at the end of the block."""
    with _as_os_error(address):
        file_system, path = _locate(address)
        with suppress(PermissionError):
            file_system.makedirs(file_system._parent(path), exist_ok=True)

        file = file_system.open(path, "wb")

    # Closing completes the object, even after an error: then it is deleted with its folder.
    try:
        yield file

        # Only a local file (file://) has a descriptor, and needs an fsync.
        with suppress(AttributeError, io.UnsupportedOperation):
            number = file.fileno()
            file.flush()
            os.fsync(number)
    finally:
        with _as_os_error(address):
            file.close()


def _delete_with_object(file: Path) -> None:
    """Delete the object whose address is in `file`, then `file`. The object may never have been written."""
    address = _read_address(file)
    if address is None:
        return

    # The file first gets another name: a rank that still writes the object sees by it that it must delete the object
    # itself. As long as the object exists, its address must not be lost.
    marked = _to_delete(file)
    with suppress(FileNotFoundError):  # another rank may delete it at this moment
        file.rename(marked)
        _delete_object(address)
        marked.unlink()


def _to_delete(file: Path) -> Path:
    """Return the name of a file with an address, once its object is to be deleted."""
    return file if file.name.startswith(_DELETED) else file.with_name(f"{_DELETED}{file.name}")


def _delete_object(address: str) -> None:
    """Delete an object, if it exists."""
    with suppress(FileNotFoundError), _as_os_error(address):
        file_system, path = _locate(address)
        file_system.rm_file(path)


class _ObjectReader(io.RawIOBase):
    """Reads an object. Whatever a store's package raises becomes an OSError."""

    def __init__(self, file: Any, address: str):
        super().__init__()
        self._file = file
        self._address = address

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _as_os_error(self._address):
            return self._file.readinto(buffer)

    def seek(self, position: int, whence: int = 0) -> int:
        with _as_os_error(self._address):
            return self._file.seek(position, whence)

    def close(self) -> None:
        if not self.closed:
            with _as_os_error(self._address):
                self._file.close()

        super().close()


@contextmanager
def _as_os_error(address: str) -> Iterator[None]:
    """Turn the errors of a store's package into OSError, which costs a checkpoint, but not the run."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", address) from error
