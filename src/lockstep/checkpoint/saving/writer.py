"""One save, from the snapshot to the commit. Each rank writes and confirms its file; then rank 0 commits.

    every rank   step-N.tmp-TOKEN-NUMBER/rank-RANK.safetensors   its file, durable
    every rank   step-N.tmp-TOKEN-NUMBER/rank-RANK.json          its confirmation: size, digest, pieces; or an error
    rank 0       waits for all confirmations, checks them, and deletes them
    rank 0       step-N.tmp-TOKEN-NUMBER/manifest.json           durable
    rank 0       checks that it still owns the storage
    rank 0       step-N -> step-N.undone                         if step N was saved before
    rank 0       step-N.tmp-TOKEN-NUMBER -> step-N               the commit
    rank 0       calls `SaveContext.on_commit`
    rank 0       updates `latest` and deletes the checkpoints that `Retention` does not keep

A power cut or a kill at any moment leaves the old state or the new one: contents are durable before names, the manifest
before the rename, and the rename before `latest` changes and before an old checkpoint is deleted. One exception: if
step N is saved again and the process dies between the two renames, no step-N exists; the old checkpoint is
step-N.undone. Ranks communicate only through the storage, so that a rank which hangs does not block the writing threads
of the others. This module does not import torch.
"""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash
from rich.filesize import decimal as size_text

import lockstep
from lockstep import faults
from lockstep.checkpoint.format import FileLayout, file_name
from lockstep.checkpoint.manifest import (
    MANIFEST,
    File,
    InvalidCheckpoint,
    Manifest,
    Piece,
    TensorEntry,
    decode,
    encode,
    tensors_to_json,
)
from lockstep.checkpoint.retention import Retention, apply_retention
from lockstep.checkpoint.storage import (
    Checkpoint,
    CheckpointStorage,
    folder_name,
    set_aside,
    update_latest,
)
from lockstep.checkpoint.storage.protocol import split
from lockstep.errors import listed_ranks


@dataclass(frozen=True)
class SaveContext:
    """The settings that all saves of a run share."""

    storage: CheckpointStorage
    rank: int
    world_size: int
    token: str  # identifies this attempt of the run
    retention: Retention
    timeout_s: float = 600.0  # how long rank 0 waits for the other ranks' files
    on_commit: Callable[[], None] = lambda: None  # called on rank 0 right after the rename; it must not raise

    def __post_init__(self) -> None:
        assert self.token.isalnum(), self.token  # it becomes part of a folder's name


# ---- how a save ends ----


@dataclass(frozen=True)
class Written:
    """This rank's file is durable, and the rest is up to rank 0: the outcome on all other ranks."""


@dataclass(frozen=True)
class Committed:
    """The checkpoint is complete and has its final name: the outcome on rank 0."""

    checkpoint: Checkpoint
    total_bytes: int  # of all files
    tidying_error: str = ""  # why tidying up after the commit failed; the checkpoint is safe


@dataclass(frozen=True)
class Failed:
    """The save was not committed, and its files were deleted."""

    reason: str
    caused_elsewhere: bool = False  # by another rank or another attempt


Outcome = Written | Committed | Failed


@dataclass(frozen=True)
class Confirmation:
    """What a rank writes next to its file, for rank 0: what the manifest will say of the file, or why there is none."""

    file: File | None
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)  # with the pieces that are in this file
    error: str = ""

    def encode(self) -> bytes:
        file = vars(self.file) if self.file else None
        return json.dumps({"file": file, "tensors": tensors_to_json(self.tensors), "error": self.error}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Confirmation:
        """Undo `encode`. A rank of this attempt has written it, so its fields are not checked here."""
        fields = json.loads(data)
        file = File(**fields["file"]) if fields["file"] else None
        tensors = {
            name: TensorEntry(entry["dtype"], tuple(entry["shape"]), tuple(Piece(**p) for p in entry["pieces"]))
            for name, entry in fields["tensors"].items()
        }
        return cls(file, tensors, fields["error"])


class SaveFailed(Exception):
    """A save must not be committed, for a reason other than an OSError. The message is the reason."""

    def __init__(self, reason: str, caused_elsewhere: bool = False):
        super().__init__(reason)
        self.caused_elsewhere = caused_elsewhere


class Save:
    """One save on one rank: pending until it has an `outcome`.

    `run` may run in a thread. Of the other methods, the training thread calls only `check_room`, `abandon` and
    `discard`.
    """

    def __init__(self, context: SaveContext, step: int, number: int, file_size: int):
        self.context = context
        self.step = step
        self.file_size = file_size  # of this rank's file, in bytes

        # The files are in this folder until the commit renames it. The token keeps writers of an earlier attempt out of
        # it, and the number keeps out writers of an earlier save of the same step.
        self.folder = f"{folder_name(step)}.tmp-{context.token}-{number}"

        # None while the save is pending.
        self.outcome: Outcome | None = None

        self.stall_s = 0.0  # how long training waited for the save
        self.write_s = 0.0  # from the start of `run` until this rank's file is durable; on rank 0, until the commit
        self.file_ended = threading.Event()  # set once this rank's file is durable or has failed
        self._began = 0.0  # when `run` was called

        # A request of the training thread to end the save: see `abandon`.
        self.abandoned = threading.Event()
        self._why_abandoned = ""

    def run(
        self,
        layout: FileLayout,
        data: memoryview,
        finish_copy: Callable[[], None],
        aliases: dict[str, str],
        values: dict[str, Any],
    ) -> None:
        """Write, confirm and (on rank 0) commit. It never raises: `outcome` says how it ended.

        `data` is the data section of this rank's file; `finish_copy` waits until `data` is complete, or raises. Only
        rank 0's `aliases` and `values` are used.
        """
        self._began = time.perf_counter()
        try:
            finish_copy()
            self._write_file(layout, data)
            self.write_s = time.perf_counter() - self._began
            self.file_ended.set()

            if self.context.rank == 0:
                self.outcome = self._commit(aliases, values)
                self.outcome = replace(self.outcome, tidying_error=self._tidy_up())
            else:
                self._check_abandoned()
                self.outcome = Written()
        except BaseException as error:
            # An exception would be lost with the thread.
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Delete the uncommitted files, report the failure to rank 0, and set the outcome."""
        failed = Failed(_as_text(error))
        try:
            failed = self._explain(error)
            self._delete_uncommitted()

            # Tell rank 0 not to wait for this rank's file. If this fails as well, the first error is reported.
            if self.context.rank != 0 and not self.abandoned.is_set():
                with suppress(OSError):
                    self._confirm(Confirmation(None, error=failed.reason))
        finally:
            # Training waits for this event and then reads the outcome.
            self.outcome = failed
            self.file_ended.set()

    def check_room(self) -> bool:
        """Return whether this rank's file fits on the disk. If not, the save fails before anything is written."""
        try:
            missing = self.file_size - self.context.storage.free_bytes()
            if missing > 0:
                sizes = f"{size_text(self.file_size)} to write, {size_text(missing)} too little"
                raise SaveFailed(f"{self._no_room()}: {sizes}")
        except (OSError, SaveFailed) as error:
            self.fail(error)
            return False

        return True

    def abandon(self, why: str) -> None:
        """Ask the thread of `run` to end the save as failed. It may have ended the save before it sees this."""
        self._why_abandoned = why
        self.abandoned.set()

    def discard(self) -> None:
        """Fail an abandoned save whose thread has ended, even if the thread did not see that it was abandoned."""
        self._delete_uncommitted()
        if isinstance(self.outcome, Written):
            self.outcome = Failed(self._why_abandoned)

    def _delete_uncommitted(self) -> None:
        """Delete this rank's uncommitted files; rank 0 deletes the folder. After the commit, this does nothing."""
        rank = self.context.rank
        keys = [self._key(file_name(rank)), self._confirmation_key(rank)] if rank else [self.folder]

        # The next start deletes files that cannot be deleted now.
        for key in keys:
            with suppress(OSError):
                self.context.storage.delete(key)

    # ---- every rank ----

    def _write_file(self, layout: FileLayout, data: memoryview) -> None:
        name = file_name(self.context.rank)
        digest = xxhash.xxh3_128()
        self.context.storage.write(self._key(name), self._chunks(layout, data, digest))

        # Rank 0 builds the manifest from the confirmations of all ranks.
        self._confirm(Confirmation(File(name, self.file_size, digest.hexdigest()), layout.tensors))

    def _chunks(self, layout: FileLayout, data: memoryview, digest: xxhash.xxh3_128) -> Iterator[memoryview]:
        """Yield the file chunk by chunk, and update the digest. An abandoned save ends between two chunks."""
        chunks = [memoryview(layout.header), *split(data)]
        for number, chunk in enumerate(chunks):
            self._check_abandoned()

            if number == (len(chunks) + 1) // 2:
                faults.fire("write", self.step)

            digest.update(chunk)
            yield chunk

    def _confirm(self, confirmation: Confirmation) -> None:
        self.context.storage.replace(self._confirmation_key(self.context.rank), confirmation.encode())

    def _check_abandoned(self) -> None:
        if self.abandoned.is_set():
            raise SaveFailed(self._why_abandoned)

    def _key(self, file: str) -> str:
        return f"{self.folder}/{file}"

    def _confirmation_key(self, rank: int) -> str:
        return self._key(f"rank-{rank:05d}.json")

    # ---- rank 0 ----

    def _commit(self, aliases: dict[str, str], values: dict[str, Any]) -> Committed:
        storage = self.context.storage
        manifest = self._manifest(self._wait_for_confirmations(), aliases, values)
        encoded = encode(manifest)

        # Check that the manifest can be loaded.
        decode(encoded, Checkpoint(storage, self.folder))

        # The manifest comes last: when it is durable, the folder has its final contents.
        for rank in range(self.context.world_size):
            storage.delete(self._confirmation_key(rank))

        storage.write(self._key(MANIFEST), [memoryview(encoded)])
        faults.fire("rename", self.step)

        # If this process was suspended for a while, its run may already continue elsewhere.
        owner = storage.owner()
        if owner != self.context.token:
            taken_over = f"another attempt has taken over this run (its token is {owner})"
            raise SaveFailed(taken_over if owner else "no attempt owns the checkpoints: the file `owner` is gone")

        # There may be an earlier checkpoint of the same step, either damaged, or written before a rewind.
        name = folder_name(self.step)
        if name in storage.folders():
            set_aside(storage, name, "undone")

        # The commit.
        storage.rename(self.folder, name)
        return Committed(Checkpoint(storage, name), len(encoded) + manifest.bytes)

    def _tidy_up(self) -> str:
        """Do what follows a commit. Return why that failed, or "": the checkpoint is safe whatever fails here."""
        storage = self.context.storage
        try:
            self.context.on_commit()
            faults.fire("latest", self.step)
            update_latest(storage)

            # `write_s` does not include deleting old checkpoints.
            self.write_s = time.perf_counter() - self._began
            apply_retention(storage, self.context.retention, self.context.token)
            faults.damage_committed(storage, f"{folder_name(self.step)}/{file_name(0)}", self.step)
        except BaseException as error:  # an exception would be lost with the thread
            return _as_text(error)

        return ""

    def _wait_for_confirmations(self) -> list[Confirmation]:
        """Wait for the confirmations of all ranks, and return them by rank.

        Raise SaveFailed if a rank reports an error, or after a timeout: a rank may have died.
        """
        ranks = set(range(self.context.world_size))
        confirmations: dict[int, Confirmation] = {}
        deadline = time.monotonic() + self.context.timeout_s

        # Begin with a short pause (in seconds): ranks save at the same time, so the others are probably almost done.
        pause = 0.01

        while True:
            # A confirmation that exists is complete, since `replace` is atomic.
            for rank in ranks - confirmations.keys():
                with suppress(FileNotFoundError), self.context.storage.open(self._confirmation_key(rank)) as file:
                    confirmations[rank] = Confirmation.decode(file.read())
                if rank in confirmations:
                    self._check_confirmation(rank, confirmations[rank])

            missing = sorted(ranks - confirmations.keys())
            if not missing:
                return [confirmations[rank] for rank in sorted(ranks)]
            if time.monotonic() > deadline:
                files = "its file" if len(missing) == 1 else "their files"
                limit = f"{self.context.timeout_s:.0f} s"
                raise SaveFailed(f"{listed_ranks(missing)} did not write {files} within {limit}")

            # Sleep, but wake up as soon as the save is abandoned.
            self.abandoned.wait(pause)
            self._check_abandoned()
            pause = min(pause * 1.5, 0.25)

    def _check_confirmation(self, rank: int, confirmation: Confirmation) -> None:
        if confirmation.file is None:
            raise SaveFailed(f"rank {rank}: {confirmation.error}", caused_elsewhere=True)

        # On a shared file system, a file that another machine wrote may not be visible yet, or may be lost: then the
        # save fails.
        written = confirmation.file.size
        with self.context.storage.open(self._key(file_name(rank))) as file:
            size = file.seek(0, 2)

        if size != written:
            raise SaveFailed(f"rank {rank} wrote {written:,} bytes, but its file has {size:,}")

    def _manifest(self, confirmations: list[Confirmation], aliases: dict[str, str], values: dict[str, Any]) -> Manifest:
        # The dtype and shape of each tensor, as the first rank has them, and the pieces of all ranks.
        tensors: dict[str, TensorEntry] = {}
        pieces: dict[str, list[Piece]] = {}

        for confirmation in confirmations:
            for name, entry in confirmation.tensors.items():
                first = tensors.setdefault(name, entry)
                if (first.dtype, first.shape) != (entry.dtype, entry.shape):
                    raise SaveFailed(f"the ranks do not agree on the dtype and shape of {name!r}")

                pieces.setdefault(name, []).extend(entry.pieces)

        return Manifest(
            step=self.step,
            time=time.time(),
            lockstep=lockstep.__version__,
            files=tuple(confirmation.file for confirmation in confirmations if confirmation.file),
            tensors={name: replace(entry, pieces=tuple(pieces[name])) for name, entry in tensors.items()},
            aliases=aliases,
            values=values,
        )

    # ---- reasons ----

    def _explain(self, error: BaseException) -> Failed:
        if self.abandoned.is_set():
            return Failed(self._why_abandoned)

        match error:
            case SaveFailed():
                return Failed(str(error), error.caused_elsewhere)
            case InvalidCheckpoint():
                return Failed(str(error))
            case FileNotFoundError() | FileExistsError() if self._folder_is_gone():
                # Rank 0 deletes the folder of a failed save, and a new attempt deletes the folders of all others.
                # (`mkdir` may raise FileExistsError if a folder is deleted at that moment.)
                why = "rank 0 abandoned the save, or another attempt has taken over: the uncommitted folder is gone"
                return Failed(why, caused_elsewhere=True)
            case OSError(errno=errno.ENOSPC | errno.EDQUOT):
                # The disk is full, or the user's quota is exhausted.
                return Failed(f"{self._no_room()} while writing {size_text(self.file_size)}")
            case _:
                return Failed(_as_text(error))

    def _folder_is_gone(self) -> bool:
        # If listing fails as well, the first error remains the reason.
        with suppress(OSError):
            return self.folder not in self.context.storage.folders()

        return False

    def _no_room(self) -> str:
        return f"no space left on the disk of {self.context.storage.address}"


def _as_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
