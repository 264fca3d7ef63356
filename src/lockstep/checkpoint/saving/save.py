"""The saves of one rank, while training continues: take a snapshot, write the file, confirm it, and on rank 0 commit.

`Saver.copy_and_write` copies the tensors that the next forward may change, and returns a `Save`, which writes them in a
thread of its own. Before the next update, `Save.wait_for_copy` waits until the optimizers' state and the averages
have been copied. Each save ends with an outcome (`outcome.py`): `Committed` on rank 0 or `Written` on another rank, or
`SaveFailed`. A save that fails while it is written raises nothing, and does not affect the next one; `pending.py` says
how the other ranks learn of it. Only `reserve` and `copy_and_write` raise: if a checkpoint cannot hold a tensor, or if
a copy fails.

`draft.py` has the folder to which all ranks write, `commit.py` what follows on rank 0.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

import xxhash
from rich.filesize import decimal as size_text

from lockstep import faults
from lockstep.checkpoint.manifest import File, InvalidCheckpoint
from lockstep.checkpoint.saving.commit import commit, tidy_up
from lockstep.checkpoint.saving.draft import Confirmation, Draft, SaveContext
from lockstep.checkpoint.saving.outcome import AbortRequest, Committed, SaveFailed, Written, as_text
from lockstep.checkpoint.saving.snapshot import Snapshot, SnapshotBuffer
from lockstep.checkpoint.state.reshard import Rank0Contents, RankContents
from lockstep.checkpoint.storage.durable import split
from lockstep.run_folder.checkpoint_names import file_name
from lockstep.runtime.shards import LocalShard

# How long the end of a run waits for the thread of an aborted save, in seconds: a disk may not answer.
ABORT_S = 1.0


class Saver:
    """Has the buffer of one rank, and lets one save after another write it.

    All ranks call `copy_and_write` for the same steps. A save waits until the previous one has ended with the buffer.
    """

    def __init__(self, context: SaveContext):
        self._context = context
        self._buffer = SnapshotBuffer(file_name(context.rank))

        self._last: Save | None = None  # it uses the buffer until it has ended
        self._saves = 0  # numbers the drafts: the same step may be saved again after a failure

    def reserve(self, shards: Mapping[str, LocalShard]) -> None:
        """Allocate the buffer early, so that the first save of `shards` is as fast as later ones."""
        self._wait_for_last()
        self._buffer.reserve(shards)

    def copy_and_write(self, step: int, contents: RankContents, metrics: Mapping[str, float] = {}) -> Save:
        """Copy the contents, and write the snapshot in a thread, or at once. The thread may copy some tensors, too.

        `metrics`: the results of an evaluation of this step; {} if there was none. `Save.stall_s` is the time that this
        call took. A caller for which training has waited longer sets it again.
        """
        began = time.perf_counter()
        self._wait_for_last()

        layout = self._buffer.reserve(contents.shards)
        self._saves += 1
        self._last = save = Save(Draft(self._context, step, self._saves), layout.file_size, metrics)

        # Only this rank's own file counts: other ranks may have other disks, and may write much less or much more.
        if not save.fail_if_full():
            later = contents.copy_later if self._context.checkpoint_config.asynchronous else ()
            save.write(self._buffer.take(contents.shards, later), contents.of_rank0)

        save.stall_s = time.perf_counter() - began
        return save

    def close(self) -> None:
        """Abort a save that has not ended (call `Save.wait` first to keep it), and free the buffer."""
        if self._last is not None and not self._last.wait(0):
            self._last.abort("the run ended before this checkpoint was written", ABORT_S)

        self._buffer = SnapshotBuffer(file_name(self._context.rank))

    def _wait_for_last(self) -> None:
        if self._last is not None:
            self._last.wait()


class Save:
    """One save on one rank, in these states:

        copying         the thread completes the copy while training continues, until `wait_for_copy` returns
           |
        writing         it writes this rank's file and confirms it, until `wait_for_file` returns
           |
        confirmed       rank 0 waits for the other ranks, and commits; `outcome` is `Written` on the other ranks
           |
        committed       on rank 0 alone: `outcome` is `Committed`, and what is old is deleted, until `wait` returns

        failed          from any state but committed, by an error or by `abort`: `outcome` is `SaveFailed`

    The training thread calls the methods without an underscore. The others run in the thread of this save.
    """

    def __init__(self, draft: Draft, file_size: int, metrics: Mapping[str, float]):
        """Prepare to save into `draft`. Nothing is written here.

        The file of this rank will have `file_size` bytes. `metrics` are empty, or come from an evaluation of this step;
        `checkpoint.best` compares them, and until the commit nothing else has them.
        """
        self.draft = draft
        self.context = draft.context
        self.step = draft.step
        self.file_size = file_size

        # Final: rank 0 writes these at the commit. `PendingSave` has metrics that come later.
        self.metrics: Final = metrics

        # Set when the save ends. Later changes: rank 0 adds warnings while it tidies up after the commit, until `wait`
        # returns True, and on other ranks `abort` turns `Written` into a failure.
        self.outcome: Written | Committed | SaveFailed | None = None
        self._file_ended = threading.Event()  # set once this rank's file is durable or has failed
        self._abort = AbortRequest()
        self._thread: threading.Thread | None = None

        # The snapshot, which may be copied while training continues; None: nothing is left to wait for. It is dropped
        # once it is complete, because it would keep the buffer in memory.
        self._copying: Snapshot | None = None

        self.stall_s = 0.0  # how long training waited for the save
        self.write_s = 0.0  # until this rank's file is durable; on rank 0, until the commit

    # ---- what the training thread calls ----

    def write(self, snapshot: Snapshot, of_rank0: Rank0Contents) -> None:
        """Write the snapshot in a thread, or at once with `checkpoint.asynchronous=false`."""
        self._copying = snapshot

        # The thread gets the snapshot, and not the shards, which training changes meanwhile.
        run = partial(self._run, snapshot, of_rank0)
        if self.context.checkpoint_config.asynchronous:
            # A daemon thread, which does not keep the process alive at its end.
            self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            run()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the save has ended, or for `timeout` seconds. Return whether it has ended."""
        if self._thread is not None:
            self._thread.join(timeout)
            return not self._thread.is_alive()

        return True

    def wait_for_file(self) -> None:
        """Wait until this rank's own file is durable or has failed. Other ranks may still be writing."""
        self._file_ended.wait()

    def wait_for_copy(self) -> None:
        """Wait until the state is copied, before an update changes it. Return at once if there is nothing to copy."""
        copying = self._copying
        if copying is not None:
            began = time.perf_counter()
            copying.wait()
            self.stall_s += time.perf_counter() - began

    def abort(self, why: str, timeout: float | None = None) -> None:
        """End the save without a commit, unless it is already committed, and delete what this rank has written.

        After `timeout` seconds, a thread that is still writing is left alone. It gives up when the disk answers, and
        the next start deletes what the thread leaves behind.
        """
        self._abort.request(why)

        # The thread must have ended before the files are deleted.
        if self.wait(timeout):
            self.draft.delete()
            if isinstance(self.outcome, Written):
                self.outcome = SaveFailed(why)

    # ---- the thread ----

    def _run(self, snapshot: Snapshot, of_rank0: Rank0Contents) -> None:
        """Write, confirm and (on rank 0) commit. `outcome` says how the save ended: this raises no Exception."""
        began = time.perf_counter()
        try:
            # The copy of the optimizers' state may still be under way.
            snapshot.complete()
            self._copying = None
            self._write_file(snapshot)

            self.write_s = time.perf_counter() - began
            self._file_ended.set()

            if self.context.rank == 0:
                self.outcome = commit(self.draft, self._abort, of_rank0, self.metrics)
                self.write_s = time.perf_counter() - began
                self.outcome = tidy_up(self.draft, self.outcome)
            else:
                self.outcome = Written()
        except BaseException as error:
            # An exception would be lost with the thread. After the commit, the checkpoint is safe.
            if self.outcome is None:
                self._fail(error)

            # Without a thread this may be a Ctrl-C, which is meant for the run.
            if not isinstance(error, Exception):
                raise

    def _write_file(self, snapshot: Snapshot) -> None:
        """Write this rank's file, and confirm it for rank 0. The digest is computed while it is written."""
        digest = xxhash.xxh3_128()
        rank = self.context.rank
        self.context.storage.write(self.draft.file_key(rank), self._chunks(snapshot, digest))

        # The last moment for an abort: once the file is confirmed, rank 0 may commit it.
        self._abort.check()

        # Rank 0 builds the manifest from the confirmations of all ranks.
        file = File(file_name(rank), self.file_size, digest.hexdigest())
        self.draft.confirm(Confirmation(file, snapshot.layout.tensors))

    def _chunks(self, snapshot: Snapshot, digest: xxhash.xxh3_128) -> Iterator[memoryview]:
        """Yield the file chunk by chunk, and update the digest. An aborted save ends between two chunks."""
        chunks = [memoryview(snapshot.layout.header), *split(snapshot.data)]
        for number, chunk in enumerate(chunks):
            self._abort.check()

            # In the middle of the file, where tests let the process die.
            if number == (len(chunks) + 1) // 2:
                faults.fire("write", self.step)

            digest.update(chunk)
            yield chunk

    # ---- a save that fails ----

    def fail_if_full(self) -> bool:
        """Let the save fail if this rank's file does not fit on the disk. Return whether it has failed."""
        try:
            free = self.context.storage.free_bytes()

            # Only what is known to be too large is refused: other processes may fill the disk meanwhile.
            if free is not None and free < self.file_size:
                sizes = f"{size_text(self.file_size)} to write, {size_text(self.file_size - free)} too little"
                raise SaveFailed(f"{self._no_room()}: {sizes}")
        except (OSError, SaveFailed) as error:
            self._fail(error)
            return True

        return False

    def _fail(self, error: BaseException) -> None:
        """Delete what this rank has written, report the failure to rank 0, and set the outcome."""
        failed = SaveFailed(as_text(error))
        try:
            failed = self._explain(error)
            self.draft.delete()

            # Tell rank 0 not to wait for this rank's file. If that fails as well, the first error is the one to report.
            if self.context.rank != 0 and not self._abort.requested:
                with suppress(OSError):
                    self.draft.confirm(Confirmation(None, error=failed.reason))
        finally:
            # Training waits for this event and then reads the outcome.
            self.outcome = failed
            self._file_ended.set()

    def _explain(self, error: BaseException) -> SaveFailed:
        """Return the failure with its reason in words, and whether this rank is to blame."""
        if self._abort.requested:
            return SaveFailed(self._abort.reason)

        match error:
            case SaveFailed():
                return replace(error)  # without its traceback, which would keep the buffer

            case FileNotFoundError() | FileExistsError() | InvalidCheckpoint() if self.draft.is_gone():
                # Rank 0 deletes the folder of a failed save, and a new attempt deletes the folders of all others.
                # (`mkdir` may raise FileExistsError if a folder is deleted at that moment.)
                why = "rank 0 has aborted the save, or another attempt has taken over: the uncommitted folder is gone"
                return SaveFailed(why, caused_elsewhere=True, taken_over=self.context.is_taken_over())

            case InvalidCheckpoint():
                return SaveFailed(str(error))

            case OSError(errno=errno.ENOSPC | errno.EDQUOT):
                # The disk is full, or the user's quota is exhausted.
                return SaveFailed(f"{self._no_room()} while writing {size_text(self.file_size)}")

            case _:
                return SaveFailed(as_text(error))

    def _no_room(self) -> str:
        """Return the beginning of a message about a full disk."""
        return f"no space left on the disk of {self.context.storage.location}"
