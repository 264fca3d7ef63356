"""Save while training continues: take a snapshot, write it in a thread, and report the result later.

`start` copies the tensors that the next forward may change, and starts the thread. Before the next update,
`wait_for_copy` waits until the optimizers' state and the averages have been copied. `take_ended` returns the saves that
have ended. Each has an outcome (`outcome.py`): `Committed` on rank 0 or `Written` on another rank, or `SaveFailed`. A
save that fails never raises, and does not affect the next one; `pending.py` says how the other ranks learn of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

from lockstep.checkpoint.saving.context import SaveContext
from lockstep.checkpoint.saving.outcome import SaveFailed
from lockstep.checkpoint.saving.save import Save
from lockstep.checkpoint.saving.snapshot import BackgroundCopy, Snapshot
from lockstep.launch.folder.checkpoint_names import file_name
from lockstep.runtime.layout import LocalShard


class Contents(NamedTuple):
    """What one rank writes to a checkpoint. Nothing is copied yet. Only rank 0's `aliases` and `values` are used."""

    # The shards that this rank writes, by tensor name.
    shards: Mapping[str, LocalShard]

    # For tied tensors: other name -> name among the shards.
    aliases: Mapping[str, str] = {}

    # The values of the manifest, encoded by `state_tree.pack`. They must not change any more.
    values: Mapping[str, Any] = {}

    # The names of tensors to copy while training continues; they must not change before `Saver.wait_for_copy`.
    copy_later: Collection[str] = ()


class Saver:
    """Runs the saves of one rank.

    All ranks call `start` for the same steps. There is one buffer, so a save waits until the previous one has ended.
    """

    def __init__(self, context: SaveContext, asynchronous: bool = True):
        self._context = context
        self._asynchronous = asynchronous
        self._snapshot = Snapshot(file_name(context.rank))

        # The last save, and its thread while it runs.
        self._last: Save | None = None
        self._thread: threading.Thread | None = None

        # The copy that runs while training continues, from `start` to `wait_for_copy`.
        self._copying: BackgroundCopy | None = None

        self._unreported: list[Save] = []  # saves that have ended and that `take_ended` has not returned yet
        self._saves = 0  # numbers the drafts: the same step may be saved again after a failure

    def prepare(self, shards: Mapping[str, LocalShard]) -> None:
        """Allocate the buffer early, so that the first save of `shards` is as fast as later ones."""
        self._join()
        self._snapshot.reserve(shards)

    def start(self, step: int, contents: Contents) -> None:
        """Copy the contents, except those to be copied later, and start writing them."""
        began = time.perf_counter()
        self._join()

        layout = self._snapshot.reserve(contents.shards)

        # From here on, `failure` is about this save.
        self._saves += 1
        self._last = save = Save(self._context, step, self._saves, layout.file_size)

        # Only this rank's own file counts: the others may be on other disks, and may write much less or much more.
        if save.check_room():
            copy_later = contents.copy_later if self._asynchronous else ()
            self._copying = self._snapshot.take(contents.shards, copy_later)

            # Everything that the thread needs is fixed now: training changes the rest while it writes.
            aliases, values = dict(contents.aliases), dict(contents.values)
            run = partial(save.run, layout, self._snapshot.data(), self._copying.run, aliases, values)
            if self._asynchronous:
                # A daemon thread, which does not keep the process alive at its end.
                self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
                self._thread.start()
            else:
                run()

        save.stall_s = time.perf_counter() - began

        # Without a thread, the save has ended.
        if self._thread is None:
            self._unreported.append(save)

    def wait_for_copy(self) -> None:
        """Wait until the state is copied, before an update changes it. Return at once if there is nothing to copy."""
        if self._copying is not None and self._last is not None:
            began = time.perf_counter()
            self._copying.wait()
            self._copying = None
            self._last.stall_s += time.perf_counter() - began

    @property
    def failure(self) -> SaveFailed | None:
        """How the last save failed on this rank.

        None if it has not failed, or if the ranks have already agreed on the failure (`abort`).
        """
        if self._last is None or self._last.abort_requested:
            return None

        outcome = self._last.outcome
        return outcome if isinstance(outcome, SaveFailed) else None

    def wait_for_own_file(self) -> None:
        """Wait until this rank's own file is durable or has failed. Other ranks may still be writing."""
        if self._last is not None:
            self._last.file_ended.wait()

    def abort(self, why: str) -> None:
        """End the save without a commit, because it failed on some rank, and delete this rank's files of the draft."""
        if self._last is not None:
            # The thread must have ended before the files are deleted.
            self._last.request_abort(why)
            self._join()
            self._last.finish_abort()

    def take_ended(self, timeout: float | None = None) -> list[Save]:
        """Wait until the save has ended, or for `timeout` seconds. Return the saves that ended since the last call."""
        self._join(timeout)

        ended = self._unreported
        self._unreported = []
        return ended

    def close(self) -> None:
        """Abort a save that has not ended (call `take_ended` first to keep it) and free the buffer."""
        if self._thread is not None:
            self.abort("the run ended before this checkpoint was written")

        self._snapshot = Snapshot(file_name(self._context.rank))

    def _join(self, timeout: float | None = None) -> None:
        """Wait for the thread of the last save. If it has ended, the save waits for `take_ended`."""
        if self._thread is not None and self._last is not None:
            self._thread.join(timeout)
            if not self._thread.is_alive():
                self._thread = None
                self._unreported.append(self._last)
