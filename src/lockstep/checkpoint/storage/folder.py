"""RUN/checkpoints: a folder that all ranks share, with everything but the tensors, which may be in a store.

`CheckpointStorage` is the folder, and a `Checkpoint` one checkpoint in it, which the rest of the package passes around.

A store (`stores`) cannot rename, and cannot change several objects at once. So it holds only the contents of the ranks'
tensor files. Everything else is in the run's folder, and one rename there is the commit:

    RUN/checkpoints/step-00000040/manifest.json                   a file, like `latest` and `owner`
    RUN/checkpoints/step-00000040/rank-00000.safetensors.object   a small file with the URL of an object
    s3://BUCKET/RUN/step-00000040/rank-00000-RANDOM.safetensors   the object

An object is written once, at a URL that is never used again. The URL is in the folder before the object exists, so what
a killed process leaves behind is found there, and deleted with the folder. There is one exception: the eight bytes of
`try_store` have no file with their URL, and a process that is killed between their write and their deletion leaves them
in the store. Without a store, the tensors are files in the folder (`rank-00000.safetensors`).
"""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.storage.durable import create_file, free_bytes, sync_folder, sync_names, write_all, write_file
from lockstep.checkpoint.storage.stores import open_store
from lockstep.files import delete_old_temporaries, open_regular, read_bytes, replacing
from lockstep.run_folder.checkpoint_facts import folders_in
from lockstep.run_folder.checkpoint_names import (
    DELETED_PREFIX,
    LATEST,
    OWNER,
    TENSOR_SUFFIX,
    URL_SUFFIX,
    committed_names,
    file_name,
    folder_name,
    is_object_url,
    object_url,
    step_in,
)
from lockstep.run_folder.paths import CHECKPOINTS


class NotDurable(OSError):
    """A rename has happened, but may not survive a power cut."""


class CheckpointStorage:
    """The checkpoints of a run. They survive a power cut: contents are written to the disk before names.

    A key is "FOLDER/FILE", or "FILE" at the top level. A folder exists as long as it has files. A rename of a folder is
    the commit of a checkpoint: until then the folder has another name, and no reader takes it for a checkpoint. Methods
    raise FileNotFoundError if a file or folder is missing, and OSError for all other failures; errno.ENOSPC means
    "full".

    `store_url` is the store for tensors of new checkpoints (`checkpoint.store`). Tensors that were written before are
    found by the URLs in the folder, with or without it.
    """

    def __init__(self, root: Path, store_url: str | None = None):
        self.root = Path(root)
        self.store_url = store_url and store_url.rstrip("/")

    @classmethod
    def of_run(cls, run_dir: Path, store_url: str | None = None) -> CheckpointStorage:
        """Return the storage of the run in this folder."""
        return cls(run_dir / CHECKPOINTS, store_url)

    @property
    def location(self) -> str:
        """Where tensors of new checkpoints are written, for messages."""
        return self.store_url or str(self.root)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckpointStorage) and self.root.resolve() == other.root.resolve()

    def __hash__(self) -> int:
        return hash(self.root.resolve())

    def folders(self) -> list[str]:
        """Return the names of all folders, in any order."""
        return folders_in(self.root)

    def open(self, key: str) -> io.BufferedIOBase:
        """Open a file as a readable binary stream that can seek."""
        path = self.root / key
        url = _read_url(_url_file(path)) if key.endswith(TENSOR_SUFFIX) else None
        return open_store(url).open(url) if url else open_regular(path)

    def write(self, key: str, chunks: Iterable[memoryview]) -> None:
        """Write a file. It is durable when this returns; until then readers may see an incomplete file.

        The chunks are of any length. The chunks of a rank's data have at most CHUNK bytes, and are aligned to PAGE. The
        memory of all chunks is reused after this returns.
        """
        path = self.root / key
        if self.store_url and key.endswith(TENSOR_SUFFIX):
            self._write_object(path, chunks)
        else:
            write_file(path, chunks)
            sync_folder(path.parent)

    def _write_object(self, path: Path, chunks: Iterable[memoryview]) -> None:
        """Write the contents of the file `path` to the store."""
        # The URL must be whole and durable before the object exists.
        assert self.store_url is not None
        url = object_url(self.store_url, self.root.absolute().parent.name, path.parent.name, path.name)
        url_file = _url_file(path)
        with replacing(url_file) as temporary:
            write_file(temporary, [memoryview(url.encode())])

        sync_folder(url_file.parent)

        store = open_store(url)
        store.write(url, chunks)

        # Another rank, or another attempt, may have deleted the folder before the object existed. No other process
        # has the URL now.
        if _read_url(url_file) != url:
            store.delete(url)
            raise FileNotFoundError(errno.ENOENT, "deleted while its object was written", str(url_file))

    def replace(self, key: str, data: bytes, durable: bool = False) -> None:
        """Replace the contents of a small file. Readers see the old contents or the new, never a mixture.

        Unless it is `durable`, it may be old, empty or missing after a power cut.
        """
        # Most of these files are messages to running processes, which a power cut ends as well. They need no fsync,
        # which takes a millisecond or more: the next start claims the storage anew, and lists the checkpoints itself.
        path = self.root / key
        with replacing(path) as temporary, create_file(temporary) as file:
            write_all(file.fileno(), memoryview(data))
            if durable:
                os.fsync(file.fileno())

        if durable:
            sync_folder(path.parent)

    def delete_old_temporaries(self) -> None:
        """Delete temporary files of `latest` and `owner` whose writer was killed. Those in a folder go with it."""
        for name in (LATEST, OWNER):
            delete_old_temporaries(self.root / name)

    def sync_name(self) -> None:
        """Make the name of this folder durable, and the names of the folders above it. The folder must exist."""
        sync_names(self.root)

    def rename(self, folder: str, to: str) -> None:
        """Rename a folder, atomically and durably: this is the commit. `to` must not exist.

        Raise NotDurable if the folder has its new name, but may lose it in a power cut. After any other error the
        folder has its old name.
        """
        os.rename(self.root / folder, self.root / to)
        try:
            sync_folder(self.root)
        except OSError as error:
            raise NotDurable(error.errno, error.strerror, str(self.root)) from error

    def delete(self, key: str) -> None:
        """Delete a file, or a folder with all its files, and their objects. If it does not exist, do nothing."""
        path = self.root / key
        if path.is_dir():
            for url_file in list(path.glob(f"*{URL_SUFFIX}")):
                _delete_with_object(url_file)

            # Delete as much as possible before raising an error.
            shutil.rmtree(path, ignore_errors=True)
            if path.exists():
                raise OSError(errno.ENOTEMPTY, "could not be deleted", str(path))
        else:
            for url_file in (_url_file(path), _name_while_deleted(_url_file(path))):
                _delete_with_object(url_file)

            path.unlink(missing_ok=True)

            # Delete the folder with its last file. While it has other files, `rmdir` fails.
            if path.parent != self.root:
                with suppress(OSError):
                    path.parent.rmdir()

    def delete_objects(self) -> None:
        """Delete the checkpoints with objects in a store. `lockstep rm` deletes only the folder, and so their URLs."""
        for name in self.folders():
            if any((self.root / name).glob(f"*{URL_SUFFIX}")):
                self.delete(name)

    def free_bytes(self) -> int | None:
        """Return how many bytes of tensors can still be written; None if that is not known."""
        return open_store(self.store_url).free_bytes(self.store_url) if self.store_url else free_bytes(self.root)

    def try_store(self) -> None:
        """Write, read and delete a small object, if tensors are kept in a store. Raise OSError if it fails."""
        if not self.store_url:
            return

        url = object_url(self.store_url, self.root.absolute().parent.name, folder_name(0), file_name(0))
        store = open_store(url)
        written = b"lockstep"
        try:
            store.write(url, [memoryview(written)])
            with store.open(url) as file:
                read_back = file.read()
        except BaseException:
            # The first error is the one to report.
            with suppress(OSError):
                store.delete(url)

            raise

        store.delete(url)
        if read_back != written:
            raise OSError(errno.EIO, "other bytes were read than were written", url)


# ---- one checkpoint, and the list of all ----


@dataclass(frozen=True)
class Checkpoint:
    """One folder of a storage: a checkpoint that is committed, not yet committed, or set aside."""

    storage: CheckpointStorage
    name: str

    @classmethod
    def of(cls, storage: CheckpointStorage, step: int) -> Checkpoint:
        """Return the committed checkpoint of a step."""
        return cls(storage, folder_name(step))

    @property
    def path(self) -> Path:
        """The folder of this checkpoint. Its tensors may be elsewhere: `open` finds them."""
        return self.storage.root / self.name

    @property
    def step(self) -> int:
        """The step of a committed checkpoint; no other has one."""
        step = step_in(self.name)
        assert step is not None, self.name
        return step

    def exists(self) -> bool:
        """Return whether this folder is there. A run deletes its checkpoints while others read them."""
        return self.name in self.storage.folders()

    def has(self, file: str) -> bool:
        """Return whether a file is there, as this machine sees it."""
        try:
            self.open(file).close()
        except FileNotFoundError:
            return False

        return True

    def open(self, file: str) -> io.BufferedIOBase:
        return self.storage.open(f"{self.name}/{file}")


def list_checkpoints(storage: CheckpointStorage) -> list[Checkpoint]:
    """Return the committed checkpoints, newest first. `search.newest_valid` verifies their contents."""
    return [Checkpoint(storage, name) for name in committed_names(storage.folders())]


# ---- files that hold the URL of an object ----


def _url_file(path: Path) -> Path:
    return path.with_name(f"{path.name}{URL_SUFFIX}")


def _read_url(url_file: Path) -> str | None:
    """Return the URL in a file; None if there is no such file."""
    try:
        url = read_bytes(url_file, most=10_000).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None

    # A folder may come from elsewhere: no other URL is opened or deleted.
    if not is_object_url(url):
        raise OSError(errno.EINVAL, "not the URL of an object of a checkpoint", str(url_file))

    return url


def _delete_with_object(url_file: Path) -> None:
    """Delete the object whose URL is in a file, and then the file. The object may never have been written.

    The file is renamed first. A rank that is still writing the object does not find the file any more, and then deletes
    the object itself (`_write_object`). The URL is deleted last: while the object exists, it must not be lost.
    """
    url = _read_url(url_file)
    if url is None:
        return

    # Another rank may do the same at this moment.
    renamed = _name_while_deleted(url_file)
    with suppress(FileNotFoundError):
        url_file.rename(renamed)
        open_store(url).delete(url)
        renamed.unlink()


def _name_while_deleted(url_file: Path) -> Path:
    """Return the name that a file with a URL has while its object is being deleted."""
    name = url_file.name
    return url_file if name.startswith(DELETED_PREFIX) else url_file.with_name(f"{DELETED_PREFIX}{name}")
