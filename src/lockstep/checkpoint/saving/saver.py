"""Save while training continues: take a snapshot, and write it in a thread.

`start` copies the tensors that the next forward may change, and returns a `Save`, which runs in its own thread. Before
the next update, `Save.wait_for_copy` waits until the optimizers' state and the averages have been copied. Each save
ends with an outcome (`outcome.py`): `Committed` on rank 0 or `Written` on another rank, or `SaveFailed`. A save that
fails while it is written raises nothing, and does not affect the next one; `pending.py` says how the other ranks learn
of it. Only `prepare` and `start` raise: if a checkpoint cannot hold a tensor, or if a copy fails.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from lockstep.checkpoint.saving.context import Contents, SaveContext
from lockstep.checkpoint.saving.save import Save
from lockstep.checkpoint.saving.snapshot import Snapshot
from lockstep.launch.folder.checkpoint_names import file_name
from lockstep.runtime.layout import LocalShard

# How long the end of a run waits for the thread of an aborted save, in seconds: a disk may not answer.
ABORT_S = 1.0


class Saver:
    """Starts the saves of one rank.

    All ranks call `start` for the same steps. There is one buffer, so a save waits until the previous one has ended.
    """

    def __init__(self, context: SaveContext, asynchronous: bool = True):
        self._context = context
        self._asynchronous = asynchronous
        self._snapshot = Snapshot(file_name(context.rank))

        self._last: Save | None = None  # it uses the buffer until it has ended
        self._saves = 0  # numbers the drafts: the same step may be saved again after a failure

    def prepare(self, shards: Mapping[str, LocalShard]) -> None:
        """Allocate the buffer early, so that the first save of `shards` is as fast as later ones."""
        self._wait_for_last()
        self._snapshot.reserve(shards)

    def start(self, steps_done: int, contents: Contents, metrics: Mapping[str, float] = {}) -> Save:
        """Copy the contents, except those to be copied later, and start writing them. `metrics`: see `Save`."""
        began = time.perf_counter()
        self._wait_for_last()

        layout = self._snapshot.reserve(contents.shards)
        self._saves += 1
        self._last = save = Save(self._context, steps_done, self._saves, layout.file_size, metrics)

        # Only this rank's own file counts: the others may be on other disks, and may write much less or much more.
        if save.check_room():
            copy_later = contents.copy_later if self._asynchronous else ()
            copying = self._snapshot.take(contents.shards, copy_later)

            # Everything that the thread needs is fixed now: training changes the rest while it writes.
            aliases, values = dict(contents.aliases), dict(contents.values)
            save.start(layout, self._snapshot.data(), copying, aliases, values, self._asynchronous)

        save.stall_s = time.perf_counter() - began
        return save

    def close(self) -> None:
        """Abort a save that has not ended (call `Save.wait` first to keep it), and free the buffer."""
        if self._last is not None and not self._last.wait(0):
            self._last.abort("the run ended before this checkpoint was written", ABORT_S)

        self._snapshot = Snapshot(file_name(self._context.rank))

    def _wait_for_last(self) -> None:
        if self._last is not None:
            self._last.wait()
