"""One save on one rank, from the snapshot to its outcome: write the file, confirm it, and on rank 0 commit.

`draft.py` has the folder to which all ranks write, `commit.py` what follows on rank 0. This module does not import
torch.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import xxhash
from rich.filesize import decimal as size_text

from lockstep import faults
from lockstep.checkpoint.format import FileLayout
from lockstep.checkpoint.manifest import File, InvalidCheckpoint
from lockstep.checkpoint.saving.abort import AbortRequest, SaveError
from lockstep.checkpoint.saving.commit import Commit
from lockstep.checkpoint.saving.context import SaveContext
from lockstep.checkpoint.saving.draft import Confirmation, Draft
from lockstep.checkpoint.saving.outcome import Committed, SaveFailed, SaveOutcome, Written
from lockstep.checkpoint.storage.protocol import split
from lockstep.launch.folder.checkpoint_names import file_name


class Save:
    """One save on one rank: pending until it has an `outcome`.

    `run` may run in a thread. Of the other methods, the training thread calls only `check_room`, `request_abort` and
    `finish_abort`.
    """

    def __init__(self, context: SaveContext, step: int, number: int, file_size: int):
        """`number` counts the saves of this rank; `file_size` is that of its file, in bytes."""
        self.context = context
        self.step = step
        self.file_size = file_size

        self.draft = Draft(context, step, number)
        self.outcome: SaveOutcome | None = None  # None while the save is pending
        self.file_ended = threading.Event()  # set once this rank's file is durable or has failed
        self._abort = AbortRequest()

        self.stall_s = 0.0  # how long training waited for the save
        self.write_s = 0.0  # from the start of `run` until this rank's file is durable; on rank 0, until the commit
        self._began = 0.0  # when `run` was called

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
            # The copy of the optimizers' state may still be under way.
            finish_copy()
            self._write_file(layout, data)

            self.write_s = time.perf_counter() - self._began
            self.file_ended.set()

            if self.context.rank == 0:
                commit = Commit(self.draft, self.step, self._abort)
                self.outcome = self._tidy_up(commit, commit.run(aliases, values))
            else:
                self._abort.check()
                self.outcome = Written()
        except BaseException as error:
            # An exception would be lost with the thread.
            self.fail(error)

    def _write_file(self, layout: FileLayout, data: memoryview) -> None:
        """Write this rank's file, and confirm it for rank 0. The digest is computed while it is written."""
        digest = xxhash.xxh3_128()
        rank = self.context.rank
        self.context.storage.write(self.draft.file(rank), self._chunks(layout, data, digest))

        # Rank 0 builds the manifest from the confirmations of all ranks.
        file = File(file_name(rank), self.file_size, digest.hexdigest())
        self.draft.confirm(Confirmation(file, layout.tensors))

    def _chunks(self, layout: FileLayout, data: memoryview, digest: xxhash.xxh3_128) -> Iterator[memoryview]:
        """Yield the file chunk by chunk, and update the digest. An aborted save ends between two chunks."""
        chunks = [memoryview(layout.header), *split(data)]
        for number, chunk in enumerate(chunks):
            self._abort.check()

            # In the middle of the file, where tests let the process die.
            if number == (len(chunks) + 1) // 2:
                faults.fire("write", self.step)

            digest.update(chunk)
            yield chunk

    def _tidy_up(self, commit: Commit, committed: Committed) -> Committed:
        """Do what follows a commit, and return its outcome: the checkpoint is safe whatever fails here."""
        try:
            commit.announce()

            # `write_s` does not include deleting old checkpoints.
            self.write_s = time.perf_counter() - self._began
            if not committed.warning:
                commit.delete_old()
        except BaseException as error:  # an exception would be lost with the thread
            warning = f"safe, but tidying up after it failed: {_as_text(error)}"
            return replace(committed, warning=committed.warning or warning)

        return committed

    # ---- a save that fails ----

    def check_room(self) -> bool:
        """Return whether this rank's file fits on the disk. If not, the save fails before anything is written."""
        try:
            missing = self.file_size - self.context.storage.free_bytes()

            # Only what is known to be too large is refused: other processes may fill the disk meanwhile.
            if missing > 0:
                sizes = f"{size_text(self.file_size)} to write, {size_text(missing)} too little"
                raise SaveError(f"{self._no_room()}: {sizes}")
        except (OSError, SaveError) as error:
            self.fail(error)
            return False

        return True

    def request_abort(self, why: str) -> None:
        """Ask the thread of `run` to end the save as failed. It may have ended the save before it sees this."""
        self._abort.request(why)

    @property
    def abort_requested(self) -> bool:
        return self._abort.requested

    def finish_abort(self) -> None:
        """Make the save failed after its thread has ended, even if the thread never saw the request."""
        self.draft.delete()
        if isinstance(self.outcome, Written):
            self.outcome = SaveFailed(self._abort.reason)

    def fail(self, error: BaseException) -> None:
        """Delete this rank's files of the draft, report the failure to rank 0, and set the outcome."""
        failed = SaveFailed(_as_text(error))
        try:
            failed = self._explain(error)
            self.draft.delete()

            # Tell rank 0 not to wait for this rank's file. If this fails as well, the first error is reported.
            if self.context.rank != 0 and not self.abort_requested:
                with suppress(OSError):
                    self.draft.confirm(Confirmation(None, error=failed.reason))
        finally:
            # Training waits for this event and then reads the outcome.
            self.outcome = failed
            self.file_ended.set()

    def _explain(self, error: BaseException) -> SaveFailed:
        """Return the failure with its reason in words, and whether this rank is to blame."""
        if self.abort_requested:
            return SaveFailed(self._abort.reason)

        match error:
            case SaveError():
                return SaveFailed(str(error), error.caused_elsewhere)

            case InvalidCheckpoint():
                return SaveFailed(str(error))

            case FileNotFoundError() | FileExistsError() if self.draft.is_gone():
                # Rank 0 deletes the folder of a failed save, and a new attempt deletes the folders of all others.
                # (`mkdir` may raise FileExistsError if a folder is deleted at that moment.)
                why = "rank 0 has aborted the save, or another attempt has taken over: the uncommitted folder is gone"
                return SaveFailed(why, caused_elsewhere=True)

            case OSError(errno=errno.ENOSPC | errno.EDQUOT):
                # The disk is full, or the user's quota is exhausted.
                return SaveFailed(f"{self._no_room()} while writing {size_text(self.file_size)}")

            case _:
                return SaveFailed(_as_text(error))

    def _no_room(self) -> str:
        """Return the beginning of a message about a full disk."""
        return f"no space left on the disk of {self.context.storage.address}"


def _as_text(error: BaseException) -> str:
    """Return the error with its type: many messages mean nothing without it."""
    return f"{type(error).__name__}: {error}"
