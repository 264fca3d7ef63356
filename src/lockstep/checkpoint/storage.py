"""Where checkpoints are kept: the protocol `CheckpointStorage`, the rules for every kind, and `FileSystemStorage`.

A storage holds folders of files, whatever their contents. The rest of the package gets one from `open_storage`, and
reads, writes, lists, renames and deletes checkpoints only through it. CONTRIBUTING says what another kind of storage
needs, and which code looks at the folder itself. This module does not import torch, so that `lockstep ckpt ls` starts
fast.
"""

from __future__ import annotations

import errno
import fcntl
import io
import itertools
import math
import os
import re
import secrets
import shutil
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from lockstep.errors import UserError
from lockstep.launch.records import open_regular, read_bytes, replacing
from lockstep.launch.run_dir import LATEST, step_in

# The number of bytes that are written at a time.
CHUNK = 16 << 20

# Direct writes (O_DIRECT) begin and end at multiples of this, in memory and in the file. So do the chunks of a rank's
# file, except its header and the end of its last chunk: `snapshot` aligns the buffer, `format.arrange` pads the header,
# and `split` cuts the data.
PAGE = 4096

# A small file at the top level, like LATEST: the token of the only attempt allowed to commit.
OWNER = "owner"


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
        the save is abandoned; let it pass.
        """

    def replace(self, key: str, data: bytes) -> None:
        """Replace the contents of a small file. Readers see the old contents or the new, never a mixture."""

    def rename(self, folder: str, to: str) -> None:
        """Rename a folder, atomically and durably: this is the commit. `to` must not exist."""

    def delete(self, key: str) -> None:
        """Delete a file, or a folder with all its files. If it does not exist, do nothing."""

    def claim(self, token: str) -> None:
        """Make the attempt with this token the only one that may commit.

        The owner is checked just before the rename. A process suspended between the check and the rename can still
        commit.
        """

    def owner(self) -> str | None:
        """Return the token of the last claim; None before the first. An error must raise: it is no answer."""

    def free_bytes(self) -> int:
        """Return how many bytes can still be written."""


@dataclass(frozen=True)
class Checkpoint:
    """One folder of a storage: a checkpoint that is committed, not yet committed, or set aside."""

    storage: CheckpointStorage
    name: str

    @classmethod
    def at(cls, path: Path) -> Checkpoint:
        """Return the checkpoint in the folder `path` of a file system."""
        # "." and ".." are not the name that the folder has in its parent.
        path = path.resolve() if path.name in ("", "..") else path
        return cls(open_storage(path.parent), path.name)

    @property
    def location(self) -> str:
        """The location, for messages. It is not always a path: a storage may be anywhere."""
        return f"{self.storage.address}/{self.name}"

    @property
    def step(self) -> int:
        """The step of a committed checkpoint; no other has one."""
        step = step_in(self.name)
        assert step is not None, self.name
        return step

    def open(self, file: str) -> io.BufferedIOBase:
        return self.storage.open(f"{self.name}/{file}")


def open_storage(folder: Path) -> CheckpointStorage:
    """Return the storage of the checkpoints in `folder`. This is the only place that chooses a kind of storage."""
    return FileSystemStorage(folder)


# ---- the rules for every kind of storage ----


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def committed(storage: CheckpointStorage) -> list[Checkpoint]:
    """Return the committed checkpoints, newest first. Their contents are not verified; `load.find` does that."""
    checkpoints = [Checkpoint(storage, name) for name in storage.folders() if step_in(name) is not None]
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step, reverse=True)


def delete_leftovers(storage: CheckpointStorage, token: str) -> None:
    """Delete the uncommitted files that other attempts left half written or half deleted."""
    for name in storage.folders():
        uncommitted = re.fullmatch(r"step-\d{8,18}\.tmp-([0-9A-Za-z]+)(-\w+)?", name)
        if uncommitted and uncommitted[1] != token:
            # If another attempt still writes into the folder, the next start will delete it.
            with suppress(OSError):
                storage.delete(name)


def update_latest(storage: CheckpointStorage) -> None:
    # Only people and the launcher read this file; `load.find` lists the checkpoints themselves.
    newest = committed(storage)[:1]
    if newest:
        storage.replace(LATEST, newest[0].name.encode() + b"\n")
    else:
        storage.delete(LATEST)


def set_aside(storage: CheckpointStorage, name: str, suffix: Literal["damaged", "undone"]) -> str:
    """Rename a checkpoint to `step-N.damaged` or `step-N.undone`, so that it is ignored, but not lost.

    Return its new name.
    """
    target = _free_name(name, suffix, storage.folders())
    storage.rename(name, target)
    update_latest(storage)
    return target


def _free_name(name: str, suffix: str, taken: Container[str]) -> str:
    # The same step may have been set aside before.
    candidates = (f"{name}.{suffix}{number or ''}" for number in itertools.count())
    return next(candidate for candidate in candidates if candidate not in taken)


def set_aside_after(storage: CheckpointStorage, step: int) -> None:
    """Set aside all checkpoints after `step`, to which the run goes back."""
    # List the folder only once, however many checkpoints there are.
    taken = set(storage.folders())
    undone = [checkpoint.name for checkpoint in committed(storage) if checkpoint.step > step]
    for name in undone:
        storage.rename(name, _free_name(name, "undone", taken))

    if undone:
        update_latest(storage)


def delete_checkpoint(storage: CheckpointStorage, name: str, token: str) -> None:
    """Delete a committed checkpoint. The folder is renamed first, so that no reader finds half of it."""
    temporary = f"{name}.tmp-{token}-gone{secrets.token_hex(4)}"
    storage.rename(name, temporary)
    storage.delete(temporary)


# ---- retention ----


@dataclass(frozen=True)
class Retention:
    """The rule by which checkpoints are kept. All others are deleted after the next commit."""

    last: int = 3  # how many of the newest checkpoints to keep
    every: int | None = None  # also keep checkpoints whose step is a multiple of this
    best: str | None = None  # also keep the checkpoint with the best value of this metric
    mode: Literal["min", "max"] = "min"  # whether the smallest or the largest value is best

    def __post_init__(self) -> None:
        # The configuration and `lockstep ckpt prune` check what users type.
        for name, count in (("last", self.last), ("every", self.every)):
            if count is not None and count < 1:
                raise UserError(
                    f"Retention({name}={count}) keeps no checkpoints: the count is less than 1", "", "use 1 or more"
                )

        if self.mode not in ("min", "max"):
            raise UserError(
                f"Retention(mode={self.mode!r}) does not say which checkpoint is best", "", 'use "min" or "max"'
            )

    def score(self, metrics: Mapping[str, Any]) -> float | None:
        """Return a number that is larger for better metrics; None if there is none, or it is NaN."""
        value = metrics.get(self.best) if self.best is not None else None
        if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
            return None
        return value if self.mode == "max" else -value


def steps_to_delete(checkpoints: Sequence[tuple[int, Mapping[str, Any]]], retention: Retention) -> list[int]:
    """Return the steps to delete, oldest first, and never the newest. `checkpoints` are (step, metrics)."""
    steps = sorted(step for step, _ in checkpoints)
    keep = set(steps[-retention.last :])

    if retention.every:
        keep |= {step for step in steps if step % retention.every == 0}

    best = best_step(checkpoints, retention)
    return [step for step in steps if step not in keep and step != best]


def best_step(checkpoints: Sequence[tuple[int, Mapping[str, Any]]], retention: Retention) -> int | None:
    """Return the step that is best by `retention.best`, the newest of equals; None if no step can be compared."""
    scores = [(score, step) for step, metrics in checkpoints if (score := retention.score(metrics)) is not None]
    return max(scores)[1] if scores else None


# ---- in a file system ----


class FileSystemStorage:
    """Keeps checkpoints in a folder. They survive a power cut: contents are written to the disk before names."""

    def __init__(self, root: Path):
        self.root = Path(root)
        self.address = str(self.root)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileSystemStorage) and self.root.resolve() == other.root.resolve()

    def __hash__(self) -> int:
        return hash(self.root.resolve())

    def folders(self) -> list[str]:
        # One scandir, because a stat call for each of 200,000 entries would take a second.
        if not self.root.is_dir():
            return []
        with os.scandir(self.root) as entries:
            return [entry.name for entry in entries if entry.is_dir()]

    def open(self, key: str) -> io.BufferedIOBase:
        return open_regular(self.root / key)

    def write(self, key: str, chunks: Iterable[memoryview]) -> None:
        path = self.root / key
        _write_file(path, chunks)
        _sync_folder(path.parent)

    def replace(self, key: str, data: bytes) -> None:
        path = self.root / key
        with replacing(path, str(os.getpid())) as draft:
            _write_file(draft, [memoryview(data)])

        # A file in a folder is only a message between ranks and need not survive a power cut. Nor can its folder be
        # synced: as soon as the file exists, rank 0 may rename the folder.
        if path.parent == self.root:
            _sync_folder(self.root)

    def rename(self, folder: str, to: str) -> None:
        os.rename(self.root / folder, self.root / to)
        _sync_folder(self.root)

    def delete(self, key: str) -> None:
        path = self.root / key
        if path.is_dir():
            # Delete as much as possible before raising an error.
            shutil.rmtree(path, ignore_errors=True)
            if path.exists():
                raise OSError(errno.ENOTEMPTY, "could not be deleted", str(path))
        else:
            path.unlink(missing_ok=True)

            # Delete the folder with its last file. While it has other files, `rmdir` fails.
            if path.parent != self.root:
                with suppress(OSError):
                    path.parent.rmdir()

    def claim(self, token: str) -> None:
        # Delete temporary files of `replace` whose writer was killed. After a claim, no other writer needs them.
        for draft in (*self.root.glob(f".{LATEST}.*"), *self.root.glob(f".{OWNER}.*")):
            draft.unlink(missing_ok=True)
        self.replace(OWNER, token.encode())

    def owner(self) -> str | None:
        # Before the first claim there is no such file. Any other error must not look as if there were no owner.
        with suppress(FileNotFoundError):
            return read_bytes(self.root / OWNER, most=1000).decode(errors="replace").strip()
        return None

    def free_bytes(self) -> int:
        # The folder may not exist yet. Its nearest existing parent is on the same disk.
        folders = (self.root, *self.root.absolute().parents)
        return shutil.disk_usage(next(folder for folder in folders if folder.exists())).free


def split(data: memoryview) -> list[memoryview]:
    """Split `data` for `CheckpointStorage.write`: every chunk but the last is a whole number of pages."""
    # An abandoned save ends between two chunks.
    chunks = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]

    # An incomplete page becomes a separate chunk, since a chunk with one cannot be written directly.
    rest = len(data) % PAGE
    if chunks and rest and len(chunks[-1]) > PAGE:
        chunks[-1:] = [chunks[-1][:-rest], chunks[-1][-rest:]]

    return chunks


def _create(path: Path) -> io.FileIO:
    """Create a file and its folder. Retry if another rank deletes the folder while it is still empty."""
    attempts_left = 10

    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return open(path, "wb", buffering=0)
        except FileNotFoundError:
            attempts_left -= 1
            if not attempts_left:
                raise


def _sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable, because an fsync of a file does not cover its name."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_file(path: Path, chunks: Iterable[memoryview]) -> None:
    """Write a new file. Its contents are durable when this returns, its name is not.

    Large aligned chunks are written with O_DIRECT. Copying them to the page cache first would keep a core busy, which
    training needs, and fsync would still have to wait for the disk.
    """
    direct = hasattr(os, "O_DIRECT")
    position = 0
    with _create(path) as file:
        for chunk in chunks:
            # Small chunks are faster through the page cache.
            suitable = len(chunk) >= 1 << 20 and not len(chunk) % PAGE and not position % PAGE
            if not (direct and suitable and _write_directly(file.fileno(), chunk, position)):
                # After a file system has refused one direct write, do not try again.
                direct = direct and not suitable
                _write_all(file.fileno(), chunk, position)

            position += len(chunk)

        os.fsync(file.fileno())


def _write_all(handle: int, data: memoryview, position: int) -> None:
    # pwrite may write less than requested.
    while data:
        count = os.pwrite(handle, data, position)
        data = data[count:]
        position += count


def _write_directly(handle: int, data: memoryview, position: int) -> bool:
    """Write past the page cache. Return False if this file system or this memory does not allow it."""
    # The flag applies to the open file, so it is set for this chunk only.
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | os.O_DIRECT)
        _write_all(handle, data, position)
    except OSError as error:
        # These errors mean that direct writes are not supported. Others, such as a full disk, are real failures.
        if error.errno not in (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP):
            raise
        return False
    finally:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags)

    return True
