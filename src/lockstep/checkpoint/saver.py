"""Saving while training continues: take a snapshot now, write it in a thread, and poll for how it went.

    saver.save(step, slices, ...)   copies what the next forward may change, and starts the thread
    saver.wait_for_copy()           before the next update: waits for the copy of the optimizers' state
    saver.poll()                    after any later step: returns the saves that ended

A failed save never raises: `poll` returns it with its error, and the next save starts afresh.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lockstep.checkpoint.manifest import from_json, to_json
from lockstep.checkpoint.snapshot import Copying, Slice, Snapshot
from lockstep.checkpoint.storage import Retention, Store
from lockstep.checkpoint.writer import PendingSave, SaveContext


class Saver:
    """One rank's side of every save of a run.

    All ranks call `save` for the same steps. There is one buffer, so one save is in flight at a time: the next one
    waits for it.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        token: str,
        retention: Retention,
        asynchronous: bool = True,
        timeout_s: float = 600.0,
    ):
        assert token.isalnum(), token
        self._context = SaveContext(store, rank, size, token, retention, timeout_s)
        self._asynchronous = asynchronous
        self._snapshot = Snapshot()

        # The last save, in flight or not, and the thread of the one in flight.
        self._pending: PendingSave | None = None
        self._thread: threading.Thread | None = None

        # From `save` to `wait_for_copy`: the copying that goes on while training continues.
        self._copying: Copying | None = None

        self._ended: list[PendingSave] = []  # but not yet returned by `poll`
        self._saves = 0  # numbers the staged folders: the same step may be saved again after a failure

    def prepare(self, slices: Sequence[Slice]) -> int:
        """Allocate the buffer early, so that the first save of `slices` is as quick as the others. Return its bytes."""
        self._finish()
        return self._snapshot.fit(slices).file_size

    def save(
        self,
        step: int,
        slices: Sequence[Slice],
        aliases: Mapping[str, str],
        values: Mapping[str, Any],
        changed_only_by_update: Collection[str] = (),
    ) -> None:
        """Copy the state, and start to write it.

        `slices`: what this rank writes. Only rank 0's `aliases` and `values` are used.
        `changed_only_by_update`: names of slices that are copied while training continues; they must not change before
        `wait_for_copy`.
        """
        began = time.perf_counter()
        self._finish()

        # A copy, since training will change the values. What JSON cannot hold is refused now.
        plain = from_json(to_json(dict(values)))
        layout = self._snapshot.fit(slices)

        # From here on, `failed` is about this save.
        self._saves += 1
        self._pending = pending = PendingSave(self._context, step, self._saves, layout.file_size)

        # Assume that the other ranks write about as much as this one, with 1 % to spare for manifest and rounding.
        needed = self._context.size * (layout.file_size + layout.file_size // 100)
        free = self._context.store.free_bytes()
        if free < needed:
            pending.refuse(needed - free)
        else:
            self._copying = self._snapshot.take(slices, changed_only_by_update if self._asynchronous else ())
            contents = (layout, self._snapshot.data(), self._copying.run, dict(aliases), plain)
            if self._asynchronous:
                # A daemon thread does not keep a process alive that wants to end.
                self._thread = threading.Thread(target=pending.run, args=contents, name="checkpoint", daemon=True)
                self._thread.start()
            else:
                pending.run(*contents)

        pending.stall_s = time.perf_counter() - began

        # Without a thread, the save has ended.
        if self._thread is None:
            self._ended.append(pending)

    def wait_for_copy(self) -> None:
        """Wait until the state is copied, before it changes. This costs nothing if nothing is being copied."""
        if self._copying is not None and self._pending is not None:
            began = time.perf_counter()
            self._copying.wait()
            self._copying = None
            self._pending.stall_s += time.perf_counter() - began

    @property
    def failed(self) -> PendingSave | None:
        """The last save if it failed on this rank, until all ranks agree to abandon it or another save begins."""
        # `error` is read first: the thread may commit right now, and then fail to tidy up, which is not a failed save.
        save = self._pending
        return save if save and save.error and not (save.checkpoint or save.abandoned) else None

    def wait_for_own_file(self) -> None:
        """Wait until this rank's own file is durable or has failed; rank 0 may still be waiting for the others."""
        if self._pending is not None:
            self._pending.file_ended.wait()

    def abandon(self, why: str) -> None:
        """Let no rank commit the save, because it failed on some rank. Its staged files are deleted."""
        if self._pending is not None:
            self._pending.abandon(why)

            # A thread deletes its own files when it notices.
            if self._thread is None:
                self._pending.discard()

    def poll(self) -> list[PendingSave]:
        """Return the saves that ended since the last call."""
        if self._thread is not None and not self._thread.is_alive():
            self._finish()

        # Each save is returned once.
        ended = self._ended
        self._ended = []
        return ended

    def wait(self, timeout: float | None = None) -> list[PendingSave]:
        """Wait until nothing is in flight, or for `timeout` seconds, and poll."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self.poll()

    def close(self) -> None:
        """Abandon the save in flight (call `wait` first to keep it), and free the buffer."""
        if self._thread is not None:
            self.abandon("the run ended before this checkpoint was written")
            self._finish()
        self._snapshot = Snapshot()

    def _finish(self) -> None:
        if self._thread is not None and self._pending is not None:
            self._thread.join()
            self._thread = None

            # It may have been abandoned after the thread last looked.
            if self._pending.abandoned:
                self._pending.discard()
            self._ended.append(self._pending)
